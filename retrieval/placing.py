"""Where the actors of an index go: months dealt among groups by size, replicas of a group laid on different nodes by memory.

Pure arithmetic; Ray is told the plan as a wish, so that an actor whose node is lost starts again on another one.
"""

from collections.abc import Mapping, Sequence

from cluster.config import RetrievalSettings, SearchSettings
from cluster.resources import Amounts, lacking
from retrieval.manifest import ShardManifest


def shard_bytes(shard: ShardManifest) -> int:
    """Memory that a search of the month goes through: its float32 vectors, and their half-precision copy where there is one."""
    per_value = 6 if shard.kind.name == "exact-bf16" else 4
    return shard.rows * shard.encoder.dimension * per_value


def deal(shards: Sequence[ShardManifest], groups: int) -> list[tuple[str, ...]]:
    """Months for each of at most `groups` groups: the largest first, each to the group that has least; no group empty."""
    hands: list[list[str]] = [[] for _ in range(min(groups, len(shards)))]
    held = [0] * len(hands)
    for shard in sorted(shards, key=lambda s: (-shard_bytes(s), s.month)):
        least = min(range(len(hands)), key=lambda i: (held[i], len(hands[i]), i))
        hands[least].append(shard.month)
        held[least] += shard_bytes(shard)
    return [tuple(sorted(months)) for months in hands]


def actor_resources(retrieval: RetrievalSettings) -> dict[str, float]:
    """What a shard actor reserves, by Ray's names."""
    cpus = {"CPU": retrieval.actor_cpus}
    return cpus | {"GPU": retrieval.actor_gpus} if retrieval.actor_gpus else cpus


def retrieval_bundles(retrieval: RetrievalSettings, search: SearchSettings) -> list[dict[str, float]]:
    """What the pool asks of Ray, one entry for each actor: the replicas of every group, and one that encodes queries if any is encoded."""
    shards = [actor_resources(retrieval)] * (retrieval.shard_actors * retrieval.replicas)
    return shards if search.mode == "lexical" else [*shards, {"CPU": retrieval.actor_cpus}]


def lay(
    sizes: Sequence[int], replicas: int, each: Amounts, free: Mapping[str, Amounts]
) -> list[tuple[str | None, ...]]:
    """A node for every replica of every group; None where no node has room.

    `sizes`: bytes of each group; `each`: what an actor reserves; `free`: what nodes have free, by id, memory in bytes. Two replicas share a
    node only where no other has room, and then share its memory too. A node's memory may be overdrawn: vectors are mapped from disk.
    """
    left = {node: dict(amounts) for node, amounts in free.items()}
    laid: list[list[str | None]] = [[] for _ in sizes]
    order = sorted(range(len(sizes)), key=lambda group: (-sizes[group], group))
    for _ in range(replicas):
        for group in order:
            fit = [node for node in sorted(left) if not lacking(each, left[node])]
            apart = [node for node in fit if node not in laid[group]]
            chosen = max(apart or fit, key=lambda node: left[node].get("memory", 0.0), default=None)
            if chosen is not None:
                taken = {**each, "memory": 0 if chosen in laid[group] else sizes[group]}
                for name, amount in taken.items():
                    left[chosen][name] = left[chosen].get(name, 0.0) - amount
            laid[group].append(chosen)
    return [tuple(nodes) for nodes in laid]
