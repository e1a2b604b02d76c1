"""A whole run in one process under a virtual clock: the real machines between simulated engines, tools, nodes and disks.

One seed decides everything, so a failing seed replays exactly. See docs/simulation.md.
"""
