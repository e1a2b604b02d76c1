import datetime as dt

from hypothesis import given
from hypothesis import strategies as st

from retrieval.article import Hit
from retrieval.manifest import EncoderIdentity, ShardManifest
from retrieval.scan import Span, merge

MAY = dt.date(2024, 5, 1)
IDENTITY = EncoderIdentity(name="e", fingerprint="f", dimension=2, text_characters=10)


def shard(month: str, rows: int) -> ShardManifest:
    first = dt.date.fromisoformat(f"{month}-01")
    return ShardManifest(
        month=month, rows=rows, first_day=first, last_day=first.replace(day=20), source="s", encoder=IDENTITY, files={}
    )


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
