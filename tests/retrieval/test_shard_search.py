import datetime as dt
from collections.abc import Callable

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.bounds import Norms, largest_norm
from retrieval.canonical import Ranked, canonical_scores
from retrieval.days import DayTable
from retrieval.exact import Certified, Exact
from retrieval.finder import Known
from retrieval.half import copy_norms, to_half
from retrieval.kernel_device import DeviceKernel
from retrieval.kernel_float import FloatKernel
from retrieval.kinds import certified_finder, exact_finder, rescorer
from retrieval.mask import MAXIMUM_K, Vectors
from retrieval.shard import Shard
from retrieval.shared_cutoff import SharedCutoff

Make = Callable[..., Shard]

MAY = dt.date(2024, 5, 1)


def table(offsets: list[int]) -> DayTable:
    return DayTable.of_rows([MAY + dt.timedelta(days=o) for o in offsets])


def unit(seed: int, rows: int, dimension: int) -> Vectors:
    drawn = np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def reference(
    vectors: Vectors, offsets: list[int], query: Vectors, low: int, high: int, k: int
) -> list[tuple[int, float]]:
    """Every visible row scored alone in float64, then sorted by score, newer day, lower row."""
    scores = [float((vectors[row].astype(np.float64) * query).sum()) for row in range(low, high)]
    order = sorted(range(low, high), key=lambda row: (-scores[row - low], -offsets[row], row))[:k]
    return [(row, scores[row - low]) for row in order]


def pairs(ranked: Ranked) -> list[tuple[int, float]]:
    return list(zip(ranked.rows, ranked.scores, strict=True))


def exact(vectors: Vectors, offsets: list[int], block_rows: int | None = None) -> Shard:
    days = table(offsets)
    return Shard(vectors, days, exact_finder(vectors, days, block_rows=block_rows))


def certified(vectors: Vectors, offsets: list[int], block_rows: int | None = None) -> Shard:
    days = table(offsets)
    return Shard(vectors, days, certified_finder(vectors, to_half(vectors), days, block_rows=block_rows))


def device_exact(vectors: Vectors, offsets: list[int], block_rows: int | None = None) -> Shard:
    """The path of a GPU, on the CPU."""
    days = table(offsets)
    kernel = DeviceKernel(vectors, copy_norms(vectors, to_half(vectors)), "cpu", block_rows)
    return Shard(vectors, days, Exact(rescorer(vectors, days), kernel))


def device_certified(vectors: Vectors, offsets: list[int], block_rows: int | None = None) -> Shard:
    """The path of a GPU, on the CPU."""
    days, half = table(offsets), to_half(vectors)
    kernel = DeviceKernel(half, copy_norms(vectors, half), "cpu", block_rows)
    return Shard(vectors, days, Certified(rescorer(vectors, days), kernel, exact_finder(vectors, days)))


def shared(vectors: Vectors, offsets: list[int], block_rows: int | None = None) -> Shard:
    """With FAISS wherever cutoffs coincide, whatever the dimension and the number of queries."""
    days, norms = table(offsets), Norms(row=largest_norm(vectors))
    scan = Exact(rescorer(vectors, days), FloatKernel(vectors, norms, block_rows))
    return Shard(vectors, days, SharedCutoff(vectors, norms, rescorer(vectors, days), scan, together=1))


kinds = pytest.mark.parametrize("make", [exact, certified, device_exact, device_certified, shared])


@st.composite
def searches(draw: st.DrawFn) -> tuple[Vectors, list[int], Vectors, list[tuple[int, int]], int, int]:
    """Small whole-number vectors, so that equal scores are common and every score is exact."""
    rows, dimension = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    value = st.integers(-2, 2)
    vectors = np.array(
        draw(st.lists(st.lists(value, min_size=dimension, max_size=dimension), min_size=rows, max_size=rows))
    )
    offsets = sorted(draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))
    count = draw(st.integers(1, 4))
    queries = np.array(
        draw(st.lists(st.lists(value, min_size=dimension, max_size=dimension), min_size=count, max_size=count))
    )
    ends = st.tuples(st.integers(0, rows), st.integers(0, rows)).map(lambda pair: (min(pair), max(pair)))
    ranges = draw(st.lists(ends, min_size=count, max_size=count))
    k, block = draw(st.integers(1, 12)), draw(st.integers(1, 11))
    return vectors.astype(np.float32), offsets, queries.astype(np.float32), ranges, k, block


@kinds
@given(drawn=searches())
@settings(max_examples=100, deadline=None)
def test_an_answer_is_the_sorted_list_of_all_visible_rows(
    make: Make, drawn: tuple[Vectors, list[int], Vectors, list[tuple[int, int]], int, int]
) -> None:
    vectors, offsets, queries, ranges, k, block = drawn
    answers = make(vectors, offsets, block).search(queries, ranges, k)
    for query, (low, high), answer in zip(queries, ranges, answers, strict=True):
        assert pairs(answer) == reference(vectors, offsets, query, low, high, k)


@kinds
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 300),
    dimension=st.sampled_from([1, 7, 32, 100]),
    k=st.integers(1, 20),
    block=st.sampled_from([16, 100, 8192]),
)
@settings(max_examples=40, deadline=None)
def test_answers_on_unit_vectors_equal_a_float64_reference(
    make: Make, seed: int, rows: int, dimension: int, k: int, block: int
) -> None:
    draw = np.random.default_rng(seed)
    vectors = unit(seed, rows, dimension)
    # copies and near copies: ties, and differences below the last bits of a matrix product
    vectors[draw.integers(0, rows, rows // 2)] = vectors[0]
    close = draw.integers(0, rows, rows // 4)
    vectors[close] = np.nextafter(vectors[close], np.float32(1))
    offsets = sorted(draw.integers(0, 30, rows).tolist())
    queries = np.concatenate([unit(seed + 1, 3, dimension), vectors[:1]])
    ranges = [(0, rows), (rows // 3, rows), (0, rows // 2), (rows // 4, rows - rows // 4)]
    answers = make(vectors, offsets, block).search(queries, ranges, k)
    for query, (low, high), answer in zip(queries, ranges, answers, strict=True):
        assert pairs(answer) == reference(vectors, offsets, query, low, high, k)


@kinds
@given(drawn=searches(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_other_shards_gave_leaves_out_only_what_scores_below_it(
    make: Make, drawn: tuple[Vectors, list[int], Vectors, list[tuple[int, int]], int, int], data: st.DataObject
) -> None:
    vectors, offsets, queries, ranges, k, block = drawn
    kth = data.draw(st.lists(st.sampled_from([-np.inf, *range(-17, 18)]), min_size=len(queries), max_size=len(queries)))
    rows = data.draw(st.lists(st.integers(0, 100), min_size=len(queries), max_size=len(queries)))
    known = Known(np.array(kth, np.float64), np.array(rows, np.int64))
    answers = make(vectors, offsets, block).search(queries, ranges, k, known)
    for query, (low, high), answer, least in zip(queries, ranges, answers, kth, strict=True):
        expected = reference(vectors, offsets, query, low, high, k)
        wanted = [pair for pair in expected if pair[1] >= least]
        assert pairs(answer)[: len(wanted)] == wanted
        assert set(pairs(answer)) <= set(expected)


@kinds
@pytest.mark.parametrize("queries", [1, 2, 5, 9, 40])
def test_batches_of_any_size_over_several_blocks_equal_the_reference(make: Make, queries: int) -> None:
    vectors, asked = unit(1, 1500, 48), unit(2, queries, 48)
    offsets = [i // 100 for i in range(1500)]
    draw = np.random.default_rng(queries)
    ranges = [(int(a), int(b)) for a, b in np.sort(draw.integers(0, 1501, (queries, 2)), axis=1)]
    answers = make(vectors, offsets, 200).search(asked, ranges, 10)
    for query, (low, high), answer in zip(asked, ranges, answers, strict=True):
        assert pairs(answer) == reference(vectors, offsets, query, low, high, 10)


@kinds
def test_scores_that_are_all_negative_or_tiny_or_large_are_ranked(make: Make) -> None:
    vectors, offsets = unit(3, 700, 16), [i // 100 for i in range(700)]
    vectors[:, 0] = np.abs(vectors[:, 0])
    against = np.zeros((1, 16), np.float32)
    against[0, 0] = -1
    for scale in (1.0, 1e-30, 1e-38, 1e11):
        query = (against * np.float32(scale)).astype(np.float32)
        (answer,) = make(vectors, offsets, 128).search(query, [(3, 690)], 7)
        assert pairs(answer) == reference(vectors, offsets, query[0], 3, 690, 7)


def test_answers_equal_faiss_on_the_prefix() -> None:
    vectors, queries = unit(1, 3000, 64), unit(2, 5, 64)
    offsets = [i // 100 for i in range(3000)]
    shard = exact(vectors, offsets, 700)
    for high in (1, 9, 700, 1401, 3000):
        k = min(10, high)
        distances, rows = faiss.knn(queries, vectors[:high], k, metric=faiss.METRIC_INNER_PRODUCT)
        for answer, row, distance in zip(shard.search(queries, [(0, high)] * 5, k), rows, distances, strict=True):
            assert list(answer.rows) == row.tolist()
            np.testing.assert_allclose(answer.scores, distance, atol=1e-6)


@kinds
@given(seed=st.integers(0, 1000), rows=st.integers(1, 60), k=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_a_later_cutoff_only_inserts_newer_rows(make: Make, seed: int, rows: int, k: int) -> None:
    vectors, query = unit(seed, rows, 8), unit(seed + 1, 1, 8)
    shard = make(vectors, [i // 3 for i in range(rows)], 16)
    earlier: tuple[int, ...] = ()
    for high in range(rows + 1):
        now = shard.search(query, [(0, high)], k)[0].rows
        assert all(row < high for row in now)
        old = [row for row in now if row < high - 1]
        assert old == list(earlier[: len(old)])
        assert len(old) >= min(len(earlier), k - 1)
        earlier = now


@kinds
def test_queries_with_one_cutoff_are_answered_alike_together_and_alone(make: Make) -> None:
    vectors = unit(5, 3000, 48)
    vectors[100:2900:7] = vectors[50]  # more ties than are fetched beyond k
    close = np.arange(101, 2900, 11)
    vectors[close] = np.nextafter(vectors[close - 1], np.float32(1))
    offsets = [i // 100 for i in range(3000)]
    queries = np.concatenate([unit(6, 7, 48), vectors[50:51], vectors[101:102]])
    shard = make(vectors, offsets, 512)
    for low, high in ((0, 3000), (17, 2500), (0, 5), (100, 116), (8, 9), (4, 4)):
        answers = shard.search(queries, [(low, high)] * 9, 10)
        for query, answer in zip(queries, answers, strict=True):
            assert pairs(answer) == reference(vectors, offsets, query, low, high, 10)


@kinds
def test_an_answer_does_not_depend_on_what_is_searched_with_it(make: Make) -> None:
    vectors, queries = unit(5, 9000, 384), unit(6, 33, 384)
    shard = make(vectors, [0] * 9000, 2500)
    ranges = [(0, 9000 - 37 * i) for i in range(33)]
    together = shard.search(queries, ranges, 10)
    assert together == [shard.search(queries[i : i + 1], [ranges[i]], 10)[0] for i in range(33)]


@kinds
def test_the_nearest_possible_vector_one_row_after_the_cutoff_is_never_returned(make: Make) -> None:
    vectors = unit(7, 500, 16)
    query = unit(8, 1, 16)
    vectors[300:] = query
    shard = make(vectors, [i // 10 for i in range(500)], 128)
    answer = shard.search(query, [(0, 300)], 500)[0]
    assert set(answer.rows) == set(range(300))
    assert max(answer.scores) < 1
    assert shard.search(query, [(0, 301)], 1)[0].rows == (300,)


@kinds
def test_thousands_of_equal_rows_are_ordered_by_day_then_row(make: Make) -> None:
    vectors = np.tile(unit(9, 1, 8), (5000, 1))
    offsets = [i // 50 for i in range(5000)]
    queries = np.concatenate([vectors[:1], unit(10, 1, 8), -vectors[:1]])
    shard = make(vectors, offsets, 64)
    for answer in shard.search(queries, [(0, 4999)] * 3, 60):
        assert answer.rows == (*range(4950, 4999), *range(4900, 4911))
    assert shard.counts.fallbacks == (0 if make in (exact, device_exact, shared) else 3)
    assert shard.counts.queries == 3


def test_fewer_rows_than_k_are_all_returned_and_an_empty_range_is_an_empty_answer() -> None:
    shard = Shard(unit(1, 3, 4), table([0, 0, 1]))
    few, none = shard.search(unit(2, 2, 4), [(0, 2), (1, 1)], 10)
    assert len(few.rows) == 2
    assert none == Ranked((), ())
    assert shard.search(np.empty((0, 4), np.float32), [], 10) == []


@pytest.mark.parametrize("bounds", [(2, 1), (-1, 2), (0, -1), (0, 4), (4, 4), (0, 2.0), ("0", 2)])
def test_a_range_that_does_not_lie_in_the_shard_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="row range"):
        Shard(unit(1, 3, 4), table([0, 0, 1])).search(unit(2, 1, 4), [bounds], 1)


@pytest.mark.parametrize("k", [0, -1, MAXIMUM_K + 1, True, 2.0])
def test_a_k_out_of_bounds_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="top k"):
        Shard(unit(1, 3, 4), table([0, 0, 1])).search(unit(2, 1, 4), [(0, 3)], k)


@pytest.mark.parametrize(
    "query",
    [
        np.full((1, 4), np.nan, np.float32),
        np.array([[1, 0, 0, np.inf]], np.float32),
        np.full((1, 4), 1e30, np.float32),
        np.zeros((1, 5), np.float32),
        np.zeros(4, np.float32),
        np.zeros((1, 4), np.float64),
        np.zeros((1, 4), np.float16),
        [[0.0, 0.0, 0.0, 1.0]],
    ],
)
def test_a_query_that_cannot_be_ranked_is_refused(query: Vectors) -> None:
    with pytest.raises(ValueError, match="quer"):
        Shard(unit(1, 3, 4), table([0, 0, 1])).search(query, [(0, 3)], 1)


def test_ranges_and_queries_must_be_one_to_one() -> None:
    with pytest.raises(ValueError, match="2 queries but 1"):
        Shard(unit(1, 3, 4), table([0, 0, 1])).search(unit(2, 2, 4), [(0, 3)], 1)


@pytest.mark.parametrize(
    "vectors",
    [
        unit(1, 4, 4),
        unit(1, 3, 4).astype(np.float64),
        np.asfortranarray(unit(1, 3, 4)),
        np.zeros((3, 0), np.float32),
        unit(1, 3, 4)[:, None, :],
        np.full((3, 4), np.nan, np.float32),
    ],
)
def test_vectors_that_do_not_fit_the_day_table_make_no_shard(vectors: Vectors) -> None:
    with pytest.raises(ValueError, match="vector"):
        Shard(vectors, table([0, 0, 1]))


@pytest.mark.parametrize("dimension", [1, 2, 384, 4096])
def test_a_score_is_the_same_whatever_is_scored_with_it(dimension: int) -> None:
    vectors, queries = unit(3, 600, dimension), unit(4, 3, dimension)
    rows, asked = np.arange(600), np.arange(600) % 3
    alone = [canonical_scores(vectors, rows[i : i + 1], queries[asked[i]][None, :], asked[:1])[0] for i in range(600)]
    assert canonical_scores(vectors, rows, queries, asked).tolist() == alone
