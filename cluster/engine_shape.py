"""What one engine reserves of a cluster and how its actor lies in it; nothing is reserved here.

A replica has a placement group of its own, so that engines come and go one by one. On one node it is a single bundle, whose
devices Ray gives to the actor and vLLM's own processes inherit. Over several nodes it is one bundle for each
rank, because vLLM's Ray executor takes no larger ones; the actor then holds no device itself.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import EngineSettings
from cluster.environment import engine_environment
from cluster.placement import Strategy

CONCURRENT_CALLS = 100_000
"""How many calls an engine's actor takes at once: the pool bounds them, and an abort must never queue behind them."""
LEAST_CPU = 0.001
"""Ray refuses a bundle of nothing."""


def replica_bundles(settings: EngineSettings) -> list[dict[str, float]]:
    """What one replica asks of Ray, one entry for each part that cannot be divided."""
    cpus = max(settings.cpus, LEAST_CPU)
    if settings.nodes == 1:
        return [{"CPU": cpus, "GPU": settings.gpus}] if settings.gpus else [{"CPU": cpus}]
    ranks = settings.tensor_parallel * settings.pipeline_parallel
    return [{"CPU": cpus, "GPU": 1.0}, *({"GPU": 1.0} for _ in range(ranks - 1))]


def replica_strategy(settings: EngineSettings) -> Strategy:
    """How its bundles are to lie."""
    return "STRICT_PACK" if settings.nodes == 1 else "PACK"


def scattered(nodes: Sequence[str], settings: EngineSettings) -> str | None:
    """What is wrong with ranks that lie on `nodes`, one name for each; None if every stage is on one node."""
    counts = Counter(nodes)
    if all(count % settings.tensor_parallel == 0 for count in counts.values()) and len(counts) <= settings.nodes:
        return None
    found = " + ".join(str(count) for _, count in sorted(counts.items()))
    return (
        f"{len(nodes)} ranks were placed as {found} on {len(counts)} node(s), but engine.nodes={settings.nodes} and "
        f"{settings.tensor_parallel} ranks share every layer and must lie together; free whole nodes, or lower "
        "engine.tensor_parallel"
    )


def actor_options(settings: EngineSettings, group: PlacementGroup) -> dict[str, Any]:
    """Options of the EngineActor that lies in a replica's group."""
    return {
        "num_cpus": settings.cpus,
        "num_gpus": settings.gpus if settings.nodes == 1 else 0,
        "max_concurrency": CONCURRENT_CALLS,
        # Over several nodes vLLM looks for the group of its process and places its workers there.
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=settings.nodes > 1
        ),
        "runtime_env": {"env_vars": engine_environment(settings)},
    }


def pool_bundles(settings: EngineSettings) -> list[dict[str, float]]:
    """What the engines without which a run does not begin ask together."""
    return replica_bundles(settings) * (settings.minimum or settings.replicas)
