"""Placement groups with a deadline: either all bundles are reserved in time, or nothing is and the message says why."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster.failures import InfrastructureError
from cluster.resources import Amounts, amounts, lacking, shortage, total

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

POLL_SECONDS = 0.2
"""Between two looks at a group that is not placed yet: a wait would hold a thread for each."""


async def place(
    bundles: Sequence[Amounts], strategy: Strategy, timeout_s: float, avoid: Collection[str] = ()
) -> tuple[PlacementGroup, tuple[str, ...]]:
    """Reserves `bundles`, one or more resources each; returns the group and each bundle's node by its id.

    Waits for at most `timeout_s` seconds.

    `avoid`: ids of nodes that are not to be used. Raises InfrastructureError `placement-timeout` that names what is missing.
    The caller removes the group with `release`.
    """
    selector = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"} if avoid else {}
    group = placement_group(
        [dict(bundle) for bundle in bundles],
        strategy=strategy,
        bundle_label_selector=[selector] * len(bundles) if selector else None,
    )
    try:
        async with asyncio.timeout(timeout_s):
            while (table := placement_group_table(group))["state"] != "CREATED":
                await asyncio.sleep(POLL_SECONDS)
    except BaseException as error:
        # Also when it is cancelled: a group that nobody holds would keep its resources until the session ends.
        why = _why_not(bundles, strategy, avoid) if isinstance(error, TimeoutError) else ""
        remove_placement_group(group)
        if not why:
            raise
        raise InfrastructureError("placement-timeout", f"no room within {timeout_s:g} s: {why}") from None
    where = table["bundles_to_node_id"]
    return group, tuple(where[bundle] for bundle in sorted(where))


def release(group: PlacementGroup) -> None:
    """Gives the group's resources back; actors inside it end."""
    remove_placement_group(group)


def _why_not(bundles: Sequence[Amounts], strategy: Strategy, avoid: Collection[str]) -> str:
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoid]
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
