import datetime as dt

from hypothesis import given
from hypothesis import strategies as st

from retrieval.article import Hit
from retrieval.manifest import EncoderIdentity, ShardManifest
from retrieval.scan import Span, deal, merge

MAY = dt.date(2024, 5, 1)
IDENTITY = EncoderIdentity(name="e", fingerprint="f", dimension=2, text_characters=10)


def shard(month: str, rows: int) -> ShardManifest:
    first = dt.date.fromisoformat(f"{month}-01")
    return ShardManifest(
        month=month, rows=rows, first_day=first, last_day=first.replace(day=20), source="s", encoder=IDENTITY, files={}
    )


months = st.lists(st.integers(1, 12), unique=True, min_size=1).flatmap(
    lambda numbers: st.tuples(*(st.builds(shard, st.just(f"2024-{n:02}"), st.integers(1, 99)) for n in numbers))
)


@given(months, st.integers(1, 6))
def test_every_shard_is_dealt_once_and_nobody_is_left_empty(shards: tuple[ShardManifest, ...], hands: int) -> None:
    dealt = deal(shards, hands)
    assert sorted(month for hand in dealt for month in hand) == sorted(s.month for s in shards)
    assert len(dealt) == min(hands, len(shards))
    assert all(dealt)
    rows = {s.month: s.rows for s in shards}
    loads = [sum(rows[month] for month in hand) for hand in dealt]
    assert max(loads) - min(loads) <= max(rows.values())


def test_the_largest_shards_lie_on_different_actors() -> None:
    shards = [shard("2024-01", 5), shard("2024-02", 90), shard("2024-03", 80), shard("2024-04", 7)]
    assert deal(shards, 2) == [("2024-02", "2024-04"), ("2024-01", "2024-03")]


def test_a_span_meets_a_view_exactly_when_they_share_a_day() -> None:
    span = Span.of([shard("2024-03", 1), shard("2024-05", 1)])
    assert (span.first_day, span.last_day) == (dt.date(2024, 3, 1), dt.date(2024, 5, 20))
    assert span.meets(None, dt.date(2024, 3, 1))
    assert not span.meets(None, dt.date(2024, 2, 29))
    assert span.meets(dt.date(2024, 5, 20), dt.date(2024, 6, 1))
    assert not span.meets(dt.date(2024, 5, 21), dt.date(2024, 6, 1))


hits = st.builds(
    Hit,
    article_id=st.sampled_from("abcdefgh"),
    title=st.just("t"),
    url=st.just("u"),
    day=st.integers(0, 2).map(lambda n: MAY + dt.timedelta(days=n)),
    score=st.sampled_from([0.0, -0.0, 0.5, 1.0]),
    snippet=st.just("s"),
)


@given(st.lists(st.lists(hits, max_size=8), max_size=4), st.integers(1, 6))
def test_merging_the_best_of_each_part_gives_the_best_of_all(parts: list[list[Hit]], k: int) -> None:
    everything = [hit for part in parts for hit in part]
    assert merge([hit for part in parts for hit in merge(part, k)], k) == merge(everything, k)
