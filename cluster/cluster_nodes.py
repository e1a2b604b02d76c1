"""What Ray says of the cluster's nodes: which live, which leave, and how many more engines they would hold."""

import time
from collections.abc import Collection, Sequence

import ray
from ray._private.state import state

from cluster.record import Record
from cluster.resources import Amounts, rooms


class NodesSeen(Record):
    """The cluster at one moment."""

    alive: frozenset[str]
    """Ids."""
    draining: dict[str, float | None]
    """Seconds left by id; None where no deadline is set."""
    rooms: int
    """How often the asked bundles fit into what is free on nodes that stay."""


def look_at_nodes(bundles: Sequence[Amounts], most: int, leaving: Collection[str]) -> NodesSeen:
    """Asks the cluster's control service; blocks. `most` bounds the rooms that are counted; `leaving`: ids of nodes that do not count."""
    alive = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
    # Ray has no public word for this; the autoscaler and `ray drain-node` announce a node's end here.
    deadlines = {node: int(at) for node, at in state.get_draining_nodes().items() if node in alive}
    draining = {node: max(0.0, at / 1000 - time.time()) if at else None for node, at in deadlines.items()}
    free = free_by_node()
    staying = [free[node] for node in sorted(free) if node in alive and node not in draining and node not in leaving]
    return NodesSeen(alive=alive, draining=draining, rooms=rooms(bundles, staying, most))


def free_by_node() -> dict[str, Amounts]:
    """What is free on every live node, by its id; on one that leaves, nothing. Blocks."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(state.get_draining_nodes())
    return {node: free for node, free in state.available_resources_per_node().items() if node in alive}
