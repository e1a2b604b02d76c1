"""Months dealt among groups, and groups laid on nodes."""

import datetime as dt

from hypothesis import given
from hypothesis import strategies as st

from cluster.config import RetrievalSettings, SearchSettings
from retrieval.manifest import EncoderIdentity, IndexKind, ShardManifest
from retrieval.placing import actor_resources, deal, lay, retrieval_bundles, shard_bytes

IDENTITY = EncoderIdentity(name="e", fingerprint="f", dimension=2, text_characters=10)
GIB = float(1 << 30)


def shard(month: str, rows: int) -> ShardManifest:
    first = dt.date.fromisoformat(f"{month}-01")
    return ShardManifest(
        month=month, rows=rows, first_day=first, last_day=first.replace(day=20), source="s", encoder=IDENTITY, files={}
    )


def test_a_month_weighs_what_a_search_goes_through() -> None:
    month = shard("2024-01", 10)
    assert shard_bytes(month) == 10 * 2 * 4
    assert shard_bytes(month.model_copy(update={"kind": IndexKind(name="exact-bf16")})) == 10 * 2 * (4 + 2)


months = st.lists(st.integers(1, 12), unique=True, min_size=1).flatmap(
    lambda numbers: st.tuples(*(st.builds(shard, st.just(f"2024-{n:02}"), st.integers(1, 99)) for n in numbers))
)


@given(months, st.integers(1, 6))
def test_every_shard_is_dealt_once_and_nobody_is_left_empty(shards: tuple[ShardManifest, ...], groups: int) -> None:
    dealt = deal(shards, groups)
    assert sorted(month for group in dealt for month in group) == sorted(s.month for s in shards)
    assert len(dealt) == min(groups, len(shards))
    assert all(dealt)
    rows = {s.month: s.rows for s in shards}
    loads = [sum(rows[month] for month in group) for group in dealt]
    assert max(loads) - min(loads) <= max(rows.values())


def test_months_are_dealt_by_size_and_not_by_number() -> None:
    sizes = {"2024-01": 90, "2024-02": 30, "2024-03": 30, "2024-04": 30}
    assert deal([shard(*month) for month in sizes.items()], 2) == [("2024-01",), ("2024-02", "2024-03", "2024-04")]


def nodes(*memory: float, cpus: float = 4.0) -> dict[str, dict[str, float]]:
    return {f"node-{i}": {"CPU": cpus, "memory": each} for i, each in enumerate(memory)}


def test_a_group_goes_where_most_memory_is_left() -> None:
    assert lay([50, 40, 30], 1, {"CPU": 1}, nodes(100, 60)) == [("node-0",), ("node-1",), ("node-0",)]


def test_replicas_of_a_group_lie_apart_where_they_can_and_then_share_memory() -> None:
    assert lay([10], 2, {"CPU": 1}, nodes(100, 20)) == [("node-0", "node-1")]
    assert lay([60, 40], 2, {"CPU": 1}, nodes(100)) == [("node-0", "node-0")] * 2
    shared = lay([60, 50], 3, {"CPU": 1}, nodes(300, 290))
    assert all(set(laid) == {"node-0", "node-1"} for laid in shared)


def test_a_node_without_the_cores_gets_nothing_and_ray_is_left_to_say_so() -> None:
    free = {"large": {"CPU": 0.5, "memory": 64 * GIB}, "small": {"CPU": 1.0, "memory": GIB}}
    assert lay([1, 1], 1, {"CPU": 1.0}, free) == [("small",), (None,)]
    assert lay([1], 1, {"CPU": 1.0, "GPU": 1.0}, free) == [(None,)]
    assert lay([1], 1, {"CPU": 1.0}, {}) == [(None,)]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 100)), max_size=4),
)
def test_cores_are_never_promised_twice_and_replicas_share_a_node_only_in_want(
    sizes: list[int], replicas: int, found: list[tuple[int, int]]
) -> None:
    free = {f"node-{i}": {"CPU": float(cpus), "memory": float(memory)} for i, (cpus, memory) in enumerate(found)}
    laid = lay(sizes, replicas, {"CPU": 1.0}, free)
    assert [len(each) for each in laid] == [replicas] * len(sizes)
    used = [node for each in laid for node in each if node is not None]
    assert all(used.count(node) <= amounts["CPU"] for node, amounts in free.items())
    cores = sum(int(amounts["CPU"]) for amounts in free.values())
    assert len(used) == min(cores, replicas * len(sizes))
    if all(amounts["CPU"] >= replicas * len(sizes) for amounts in free.values()):
        for each in laid:
            assert len(set(each)) == (min(replicas, len(free)) if free else 1)


def test_the_pool_asks_for_every_replica_and_the_encoder() -> None:
    settings = RetrievalSettings(shard_actors=2, replicas=3, actor_cpus=2, actor_gpus=1)
    assert retrieval_bundles(settings, SearchSettings()) == [{"CPU": 2, "GPU": 1}] * 6 + [{"CPU": 2}]
    assert retrieval_bundles(RetrievalSettings(), SearchSettings(mode="hybrid")) == [{"CPU": 0.1}] * 3
    assert retrieval_bundles(RetrievalSettings(), SearchSettings(mode="lexical")) == [{"CPU": 0.1}] * 2
    assert actor_resources(settings) == {"CPU": 2, "GPU": 1}
