"""Placement groups with a deadline: either all bundles are reserved in time, or nothing is and the message says why."""

from collections.abc import Sequence
from typing import Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.failures import InfrastructureError
from cluster.resources import Amounts, amounts, lacking, shortage, total

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


def place(bundles: Sequence[Amounts], strategy: Strategy, timeout_s: float) -> PlacementGroup:
    """Reserves `bundles`, one or more resources each, and returns the group; blocks for at most `timeout_s` seconds.

    Raises InfrastructureError `placement-timeout` that names what is missing. The caller removes the group with `release`.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    try:
        placed = group.wait(timeout_s)
    except BaseException:
        # Also on Ctrl-C: a group that nobody holds would keep its resources until the session ends.
        remove_placement_group(group)
        raise
    if not placed:
        why = _why_not(bundles, strategy)
        remove_placement_group(group)
        raise InfrastructureError("placement-timeout", f"no room within {timeout_s:g} s: {why}")
    return group


def release(group: PlacementGroup) -> None:
    """Gives the group's resources back; actors inside it end."""
    remove_placement_group(group)


def _why_not(bundles: Sequence[Amounts], strategy: Strategy) -> str:
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    if (lack := shortage(bundles, nodes)) is not None:
        return lack
    asked, free = total(bundles), ray.available_resources()
    if missing := lacking(asked, free):
        held = {name: free.get(name, 0.0) for name in asked}
        return (
            f"asked: {amounts(asked)}; free now: {amounts(held)}; missing: {amounts(missing)}, held by other work of "
            "this cluster. Wait for it, or lower engine.replicas or engine.cpus"
        )
    return f"the amounts suffice, but not arranged as {strategy} asks over {len(nodes)} node(s): {amounts(asked)}"
