"""Whatever the corpus, the queries and the days: what a whole index shows, against all articles scored in float64."""

import datetime as dt
import tempfile
from pathlib import Path

import numpy as np
import pytest
from corpora import WORDS, article
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.article import Article, Hit
from retrieval.build import build_index
from retrieval.chunks import encoded_text
from retrieval.encoder import HashingEncoder, Vectors
from retrieval.library import Library
from retrieval.manifest import EXACT, Approximation, IndexKind
from retrieval.scan import Query, search_shards

ENCODER = HashingEncoder(16)
NEW_YEAR = dt.datetime(2024, 12, 31, 12, tzinfo=dt.UTC)
HALF = IndexKind(name="exact-bf16")
LISTS = IndexKind(name="approximate", approximation=Approximation(code="sq", lists=4, probes=1, rescored=1))

instants = st.tuples(st.integers(-40, 40), st.integers(0, 86_399), st.integers(-14, 14)).map(
    lambda drawn: (NEW_YEAR + dt.timedelta(days=drawn[0], seconds=drawn[1])).astimezone(
        dt.timezone(dt.timedelta(hours=drawn[2]))
    )
)
"""Around the turn of a year, written with every offset there is."""
words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join)
corpora = st.lists(st.tuples(instants, words), min_size=1, max_size=30)
offsets = st.integers(-45, 45)
queries = st.lists(st.tuples(words, st.none() | offsets, offsets, st.integers(1, 40)), min_size=1, max_size=6)


def day(offset: int) -> dt.date:
    return NEW_YEAR.date() + dt.timedelta(days=offset)


def reference(articles: list[Article], vectors: Vectors, query: Query) -> list[tuple[str, float]]:
    """Every article scored alone in float64, those outside the days dropped, the rest sorted."""
    scores = [float((vector.astype(np.float64) * query.vector).sum()) for vector in vectors]
    visible = [
        i
        for i, a in enumerate(articles)
        if a.published.astimezone(dt.UTC).date() <= query.cutoff
        and (query.first_day is None or a.published.astimezone(dt.UTC).date() >= query.first_day)
    ]
    newest = {i: articles[i].published.astimezone(dt.UTC).date().toordinal() for i in visible}
    best = sorted(visible, key=lambda i: (-scores[i], -newest[i], articles[i].id))[: query.k]
    return [(articles[i].id, scores[i]) for i in best]


def found(hits: list[Hit]) -> list[tuple[str, float]]:
    return [(hit.article_id, hit.score) for hit in hits]


@pytest.mark.parametrize("kind", [EXACT, HALF, LISTS], ids=lambda kind: kind.name)
@given(drawn=corpora, asked=queries)
@settings(max_examples=12)
def test_an_index_shows_the_best_of_what_its_days_allow_alone_and_together(
    kind: IndexKind, drawn: list[tuple[dt.datetime, str]], asked: list[tuple[str, int | None, int, int]]
) -> None:
    articles = [article(f"a{i:02}", published, title) for i, (published, title) in enumerate(drawn)]
    vectors = ENCODER.encode([encoded_text(a, 1000) for a in articles])
    batch = [
        Query(ENCODER.encode([text])[0], None if first is None else day(first), day(cutoff), k)
        for text, first, cutoff, k in asked
    ]
    with tempfile.TemporaryDirectory() as directory:
        build_index(articles, ENCODER, Path(directory), kind=kind)
        shards = Library.open(Path(directory)).load()
        together = search_shards(shards, batch, 100)
        alone = [search_shards(shards, [query], 100)[0] for query in batch]
        # everything that the earlier cutoff shows, the later one shows too
        grown = [search_shards(shards, [Query(q.vector, q.first_day, day(45), 1_000)], 100)[0] for q in batch]
    assert together == alone
    for query, hits, later in zip(batch, together, grown, strict=True):
        assert found(hits) == reference(articles, vectors, query)
        assert all(hit.day <= query.cutoff for hit in hits)
        assert set(found(hits)) <= set(found(later))
