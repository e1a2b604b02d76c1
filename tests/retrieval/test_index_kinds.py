"""Every kind of index, built, opened and searched; and an approximate one with whatever parameters."""

import asyncio
import datetime as dt
import json
import random
from pathlib import Path

import faiss
import numpy as np
import pytest
from corpora import WORDS, article, corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import load_settings
from cluster.failures import DataError, SettingsError
from retrieval.approximate import Approximate, measured_recall, read_lists, train_lists, write_lists
from retrieval.article import Article
from retrieval.build import build_index, index_kind
from retrieval.chunks import encoded_text
from retrieval.days import DayTable
from retrieval.encoder import HashingEncoder, Vectors
from retrieval.kinds import exact_finder, rescorer
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.manifest import EXACT, FEWEST_ROWS, Approximation, IndexKind
from retrieval.shard import Shard
from retrieval.shard_files import HALF, LISTS, VECTORS

ENCODER = HashingEncoder(32)
HALF_KIND = IndexKind(name="exact-bf16")
APPROXIMATE = IndexKind(name="approximate", approximation=Approximation(code="sq", lists=None, probes=8, rescored=4))
FIRST = dt.date(2024, 5, 1)


def unit(seed: int, rows: int, dimension: int) -> Vectors:
    drawn = np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def answers(directory: Path) -> list[tuple[object, ...]]:
    searcher = LocalSearcher(Library.open(directory), ENCODER)
    draw = random.Random(5)
    asked = [(" ".join(draw.sample(WORDS, 2)), FIRST + dt.timedelta(days=draw.randrange(90))) for _ in range(40)]
    return [asyncio.run(searcher.search(query, None, cutoff, 7)) for query, cutoff in asked]


def test_half_precision_gives_the_hits_of_exact_search(tmp_path: Path) -> None:
    build_index(corpus(), ENCODER, tmp_path / "exact")
    build_index(corpus(), ENCODER, tmp_path / "half", kind=HALF_KIND)
    assert answers(tmp_path / "exact") == answers(tmp_path / "half")
    manifest = Library.open(tmp_path / "half").manifest
    assert all(HALF in shard.files for shard in manifest.shards)
    assert (manifest.kind, manifest.recall, manifest.search) == (HALF_KIND, 1.0, "exact-bf16")


@pytest.mark.parametrize("kind", [EXACT, HALF_KIND])
def test_hits_over_all_months_are_those_of_sorting_every_visible_article(tmp_path: Path, kind: IndexKind) -> None:
    build_index(corpus(), ENCODER, tmp_path, kind=kind)
    articles = corpus()
    vectors = ENCODER.encode([encoded_text(a, 1000) for a in articles]).astype(np.float64)
    searcher = LocalSearcher(Library.open(tmp_path), ENCODER)
    draw = random.Random(9)
    for _ in range(30):
        query = " ".join(draw.sample(WORDS, 2))
        first, cutoff = sorted(FIRST + dt.timedelta(days=draw.randrange(100)) for _ in range(2))
        scores = (vectors * ENCODER.encode([query])[0]).sum(axis=1)
        visible = [i for i, a in enumerate(articles) if first <= a.day <= cutoff]
        best = sorted(visible, key=lambda i: (-scores[i], -articles[i].day.toordinal(), articles[i].id))[:6]
        hits = asyncio.run(searcher.search(query, first, cutoff, 6))
        assert [(h.article_id, h.score) for h in hits] == [(articles[i].id, scores[i]) for i in best]


def test_another_kind_is_made_from_the_vectors_that_are_there(tmp_path: Path) -> None:
    class Deaf(HashingEncoder):
        def encode(self, texts: object) -> Vectors:
            raise AssertionError("nothing is to be encoded again")

    build_index(corpus(), ENCODER, tmp_path / "clean", kind=HALF_KIND)
    build_index(corpus(), ENCODER, tmp_path / "changed")
    assert build_index(corpus(), Deaf(32), tmp_path / "changed", kind=HALF_KIND).kept == 0
    assert build_index(corpus(), Deaf(32), tmp_path / "changed", kind=HALF_KIND).kept == 3
    prints = [Library.open(tmp_path / name).fingerprint for name in ("clean", "changed")]
    assert prints[0] == prints[1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [EXACT, HALF_KIND])
def test_the_files_of_a_shard_are_mapped_and_never_writable(tmp_path: Path, kind: IndexKind) -> None:
    build_index(corpus(), ENCODER, tmp_path, kind=kind)
    shards = Library.open(tmp_path).load()
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[1] for line in maps if line.endswith((VECTORS, HALF)) and str(tmp_path) in line]
    assert len(mapped) == len(shards) * (1 if kind == EXACT else 2)
    assert set(mapped) == {"r--s"}


@pytest.mark.parametrize("damage", ["gone", "flipped", "not named"])
def test_a_shard_without_its_half_precision_copy_does_not_load(tmp_path: Path, damage: str) -> None:
    build_index(corpus(), ENCODER, tmp_path, kind=HALF_KIND)
    file = tmp_path / "2024-06" / HALF
    if damage == "gone":
        file.unlink()
    elif damage == "flipped":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
    else:
        stored = json.loads((tmp_path / "manifest.json").read_text())
        del stored["shards"][1]["files"][HALF]
        (tmp_path / "manifest.json").write_text(json.dumps(stored))
    with pytest.raises(DataError, match=HALF):
        Library.open(tmp_path).load()


def test_an_index_of_an_earlier_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    build_index(corpus(), ENCODER, tmp_path)
    stored = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**stored, "format": "pastcast-index-1", "kind": "exact"}))
    with pytest.raises(DataError, match=r"pastcast-index-1.*pastcast-index-3.*pastcast index build"):
        Library.open(tmp_path)


def test_settings_that_name_another_kind_than_the_index_are_refused(tmp_path: Path) -> None:
    build_index(corpus(), ENCODER, tmp_path)
    library = Library.open(tmp_path)
    library.require_kind(index_kind(load_settings().index))
    asked = load_settings(overrides=["index.kind=approximate", "index.approximate={code: pq, probes: 3}"])
    with pytest.raises(SettingsError, match=r"exact, but the settings ask for approximate \(code=pq, .*probes=3"):
        library.require_kind(index_kind(asked.index))


def test_an_approximate_kind_says_how() -> None:
    with pytest.raises(ValueError, match="says how"):
        IndexKind(name="approximate")
    with pytest.raises(ValueError, match="says how"):
        IndexKind(name="exact", approximation=APPROXIMATE.approximation)


def large_corpus() -> list[Article]:
    """One month with enough articles for lists, and one without."""
    draw = random.Random(1)
    start = dt.datetime(2024, 6, 1, tzinfo=dt.UTC)
    made = []
    for i in range(FEWEST_ROWS + 500):
        days = draw.randrange(30) if i > 20 else draw.randrange(31, 40)
        words = [f"{draw.choice(WORDS)}{draw.randrange(40)}" for _ in range(6)]
        made.append(article(f"n{i:05}", start + dt.timedelta(days=days), " ".join(words)))
    return made


def test_an_approximate_index_states_its_recall_and_searches_small_months_exactly(tmp_path: Path) -> None:
    articles = large_corpus()
    build_index(articles, ENCODER, tmp_path, kind=APPROXIMATE)
    library = Library.open(tmp_path)
    june, july = library.manifest.shards
    assert LISTS in june.files
    assert LISTS not in july.files
    assert june.recall is not None
    assert 0.5 < june.recall <= 1
    assert july.recall is None
    assert june.recall <= library.manifest.recall <= 1
    assert f"recall@10 {library.manifest.recall:.3f}" in library.manifest.search
    days = {a.id: a.day for a in articles}
    searcher = LocalSearcher(library, ENCODER)
    for query, cutoff in (("harbour3 ballot9", dt.date(2024, 6, 9)), ("copper1", dt.date(2024, 7, 3))):
        hits = asyncio.run(searcher.search(query, None, cutoff, 10))
        assert len(hits) == 10
        assert all(hit.day == days[hit.article_id] <= cutoff for hit in hits)
        assert list(hits) == sorted(hits, key=lambda h: (-h.score, -h.day.toordinal(), h.article_id))
    broken = tmp_path / "2024-06" / LISTS
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(DataError, match=LISTS):
        library.load()


ROWS = 6_000
VECTORS_OF_SIX_THOUSAND = unit(1, ROWS, 16)
TABLE = DayTable.of_rows([FIRST + dt.timedelta(days=i // 200) for i in range(ROWS)])
SQ = Approximation(code="sq", lists=40, probes=4, rescored=2)


@pytest.fixture(scope="module")
def lists() -> faiss.IndexIVF:
    return train_lists(VECTORS_OF_SIX_THOUSAND, SQ)


def approximate(lists: faiss.IndexIVF, probes: int, rescored: int) -> Shard:
    vectors = VECTORS_OF_SIX_THOUSAND
    how = Approximation(code="sq", lists=40, probes=probes, rescored=rescored)
    return Shard(vectors, TABLE, Approximate(rescorer(vectors, TABLE), exact_finder(vectors, TABLE), lists, how))


@given(
    probes=st.integers(1, 60),
    rescored=st.integers(1, 8),
    k=st.integers(1, 40),
    ends=st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_lists_give_k_rows_of_the_range_in_order_whatever_their_parameters(
    lists: faiss.IndexIVF, probes: int, rescored: int, k: int, ends: list[tuple[int, int]]
) -> None:
    ranges = [(min(pair), max(pair)) for pair in ends]
    # each query is the row just after its range: the nearest possible vector is never visible
    queries = np.stack([VECTORS_OF_SIX_THOUSAND[min(high, ROWS - 1)] for _, high in ranges])
    shard = approximate(lists, probes, rescored)
    exact = Shard(VECTORS_OF_SIX_THOUSAND, TABLE).search(queries, ranges, k)
    for (low, high), answer, best in zip(ranges, shard.search(queries, ranges, k), exact, strict=True):
        assert len(answer.rows) == len(set(answer.rows)) == min(k, high - low)
        assert all(low <= row < high for row in answer.rows)
        assert all(a <= b for a, b in zip(answer.scores, best.scores, strict=True))
        order = [(-s, -TABLE.day_of(r).toordinal(), r) for r, s in zip(answer.rows, answer.scores, strict=True)]
        assert order == sorted(order)


def test_looking_into_every_list_finds_what_exact_search_finds(lists: faiss.IndexIVF) -> None:
    shard = approximate(lists, 40, 8)
    queries, ranges = unit(2, 5, 16), [(0, ROWS), (100, 5_000), (0, 2_000), (7, 7), (0, 60)]
    assert shard.search(queries, ranges, 10) == Shard(VECTORS_OF_SIX_THOUSAND, TABLE).search(queries, ranges, 10)
    assert shard.counts.fallbacks == 1


def test_recall_is_one_for_an_exact_search_and_less_where_few_lists_are_looked_into(lists: faiss.IndexIVF) -> None:
    vectors = VECTORS_OF_SIX_THOUSAND
    exact = exact_finder(vectors, TABLE)
    assert measured_recall(exact, exact, vectors) == 1
    of = [
        Approximate(rescorer(vectors, TABLE), exact, lists, SQ.model_copy(update={"probes": probes}))
        for probes in (1, 4, 40)
    ]
    recalls = [measured_recall(finder, exact, vectors) for finder in of]
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.9 < recalls[-1]


def test_product_quantization_needs_a_dimension_that_it_can_cut(tmp_path: Path) -> None:
    how = Approximation(code="pq", lists=10, probes=10, rescored=20)
    with pytest.raises(ValueError, match="multiple of 4"):
        train_lists(unit(1, 300, 6), how)
    vectors = unit(3, 5_100, 8)
    write_lists(train_lists(vectors, how), tmp_path / LISTS)
    table = DayTable.of_rows([FIRST] * 5_100)
    exact = exact_finder(vectors, table)
    finder = Approximate(rescorer(vectors, table), exact, read_lists(tmp_path / LISTS, 5_100, 8), how)
    assert measured_recall(finder, exact, vectors) > 0.9


def test_lists_of_other_rows_or_of_no_lists_are_refused(lists: faiss.IndexIVF, tmp_path: Path) -> None:
    write_lists(lists, tmp_path / LISTS)
    with pytest.raises(ValueError, match="not 5999"):
        read_lists(tmp_path / LISTS, ROWS - 1, 16)
    flat = faiss.IndexFlatIP(16)
    flat.add(VECTORS_OF_SIX_THOUSAND)
    faiss.write_index(flat, str(tmp_path / LISTS))
    with pytest.raises(ValueError, match="in lists"):
        read_lists(tmp_path / LISTS, ROWS, 16)
    (tmp_path / LISTS).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a FAISS index"):
        read_lists(tmp_path / LISTS, ROWS, 16)


def test_an_exact_index_has_no_other_files(tmp_path: Path) -> None:
    build_index(corpus(), ENCODER, tmp_path)
    (first, *_) = Library.open(tmp_path).manifest.shards
    assert first.kind == EXACT
    assert VECTORS in first.files
    assert not {HALF, LISTS} & first.files.keys()
