"""Exact inner-product search over the vectors of one publication month, masked before it ranks.

Rows are ordered by (day, id), so what a query may see is a row range [low, high), and rows outside it are never
scored into a result. The blocks of the matrix are multiplied with all queries that cover them; whatever could still be
among the best is then scored again with one canonical dot product a row, so that an answer does not depend on
which queries were searched together. Order: score, then newer day, then id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from retrieval.days import DayTable

MAXIMUM_K = 1_000
"""Most rows one query may ask for; beyond it the answer would be a copy of the corpus."""

BLOCK_ROWS = 8_192
"""Rows per matrix product: 12 MiB at 384 dimensions, large enough for BLAS and small enough to stay in cache with its scores."""

_F32_UNIT = 2.0**-24

_LARGEST_VALUE = 1e12
"""Unit vectors are expected; beyond this the products could overflow float32 and rank as infinity."""

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Ranked:
    """The answer to one query, best first."""

    rows: tuple[int, ...]
    scores: tuple[float, ...]
    """One per row, exactly representable in float32."""


def canonical_scores(vectors: Vectors, query: Vectors) -> Vectors:
    """float32 [n]: the inner product of every row with the query, summed in float64 and rounded once.

    Products of float32 are exact in float64 and their sum errs by far less than one float32 step, so the score does not depend on
    which rows or queries are scored together.
    """
    products = vectors.astype(np.float64) * query.astype(np.float64)
    scores: Vectors = products.sum(axis=1).astype(np.float32)
    return scores


class Shard:
    """Vectors of one month with their day table."""

    def __init__(self, vectors: Vectors, days: DayTable, block_rows: int = BLOCK_ROWS) -> None:
        """`vectors`: float32 [n, dimension], finite, rows as in `days`; kept, not copied. `block_rows`: rows per matrix
        product; answers do not depend on it.

        Raises ValueError if they do not fit together.
        """
        if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.flags.c_contiguous:
            raise ValueError(f"vectors must be a C-ordered float32 matrix, not {vectors.dtype} {vectors.shape}")
        if len(vectors) != days.rows:
            raise ValueError(f"{len(vectors)} vectors, but the day table has {days.rows} rows")
        self._vectors = vectors
        self._first_rows = np.asarray(days.first_rows)
        self.days = days
        self._block_rows = block_rows
        self._largest_norm = _largest_norm(vectors)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._vectors.shape[1])

    def __len__(self) -> int:
        return self.days.rows

    def search(self, queries: Vectors, ranges: Sequence[tuple[int, int]], k: int) -> list[Ranked]:
        """The best min(k, high − low) rows of each query's range [low, high).

        `queries`: [q, dimension], finite; `ranges`: one per query, 0 ≤ low ≤ high ≤ rows. Ties go to the newer day, then to
        the lower row, which is the lower id. Raises ValueError for anything else.
        """
        queries = check_queries(queries, self.dimension)
        check_k(k)
        if len(ranges) != len(queries):
            raise ValueError(f"{len(queries)} queries but {len(ranges)} row ranges")
        for low, high in ranges:
            if not 0 <= low <= high <= len(self):
                raise ValueError(f"row range [{low}, {high}) does not lie in [0, {len(self)}]")
        margins = 2 * self._error_bound(queries)
        pools = [_Pool(k, float(margin)) for margin in margins]
        for start in range(0, len(self), self._block_rows):
            stop = min(start + self._block_rows, len(self))
            covering = [i for i, (low, high) in enumerate(ranges) if max(low, start) < min(high, stop)]
            if not covering:
                continue
            scores = queries[covering] @ self._vectors[start:stop].T
            for i, row_scores in zip(covering, scores, strict=True):
                low, high = max(ranges[i][0], start), min(ranges[i][1], stop)
                pools[i].add(low, row_scores[low - start : high - start])
        return [self._rank(pool.rows(), query, k) for pool, query in zip(pools, queries, strict=True)]

    def _error_bound(self, queries: Vectors) -> NDArray[np.float64]:
        """How far a matrix product's score may lie from the canonical one, per query.

        Higham, Accuracy and Stability of Numerical Algorithms, eq. 3.5: |fl(x·y) − x·y| ≤ γₙ |x|·|y| in any order of summation, and
        |x|·|y| ≤ ‖x‖‖y‖; plus the canonical score's own rounding.
        """
        n = self.dimension + 1
        gamma = n * _F32_UNIT / (1 - n * _F32_UNIT)
        norms: NDArray[np.float64] = np.linalg.norm(queries.astype(np.float64), axis=1)
        return (gamma + _F32_UNIT) * norms * self._largest_norm + 1e-30

    def _rank(self, rows: NDArray[np.int64], query: Vectors, k: int) -> Ranked:
        if not len(rows):
            return Ranked((), ())
        scores = canonical_scores(self._vectors[rows], query)
        days = np.searchsorted(self._first_rows, rows, side="right")
        best = np.lexsort((rows, -days, -scores))[:k]
        return Ranked(tuple(rows[best].tolist()), tuple(scores[best].tolist()))


@dataclass
class _Pool:
    """Rows that may still be among a query's best k: those within `margin` of the k-th best approximate score."""

    k: int
    margin: float
    _rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _scores: Vectors = field(default_factory=lambda: np.empty(0, np.float32))

    def add(self, first_row: int, scores: Vectors) -> None:
        """Scores of the consecutive rows from `first_row`."""
        all_scores = np.concatenate([self._scores, scores])
        if len(all_scores) <= self.k:
            keep = np.arange(len(all_scores))
        else:
            # float64: a margin below the scores' own resolution must widen the threshold, not vanish in it
            kth = float(np.partition(all_scores, -self.k)[-self.k])
            keep = np.flatnonzero(all_scores.astype(np.float64) >= kth - self.margin)
        rows = np.concatenate([self._rows, np.arange(first_row, first_row + len(scores))])
        self._rows, self._scores = rows[keep], all_scores[keep]

    def rows(self) -> NDArray[np.int64]:
        return self._rows


def check_k(k: int) -> None:
    """Raises ValueError unless 1 ≤ k ≤ MAXIMUM_K."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAXIMUM_K:
        raise ValueError(f"top k must be a whole number from 1 to {MAXIMUM_K}, not {k!r}")


def check_queries(queries: Vectors, dimension: int) -> Vectors:
    """The queries as a C-ordered matrix. Raises ValueError unless they are finite float32 [q, dimension]."""
    if queries.ndim != 2 or queries.shape[1] != dimension or queries.dtype != np.float32:
        raise ValueError(f"queries must be float32 [q, {dimension}], not {queries.dtype} {list(queries.shape)}")
    if not np.isfinite(queries).all() or np.abs(queries).max(initial=0) > _LARGEST_VALUE:
        raise ValueError("a query vector holds NaN, infinity or a huge value, so its scores would not rank")
    return np.ascontiguousarray(queries)


def _largest_norm(vectors: Vectors) -> float:
    largest = 0.0
    for start in range(0, len(vectors), BLOCK_ROWS):
        block = vectors[start : start + BLOCK_ROWS]
        squares = np.einsum("nd,nd->n", block, block, dtype=np.float64)
        unusable = ~(squares <= _LARGEST_VALUE**2)
        if unusable.any():
            raise ValueError(f"the vector of row {start + int(unusable.argmax())} holds NaN, infinity or a huge value")
        largest = max(largest, float(squares.max()))
    return float(np.sqrt(largest))
