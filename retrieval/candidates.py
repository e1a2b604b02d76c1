"""Candidates: the rows that may still be among each query's best k, while a scan goes on.

A block's rows enter when they reach the query's threshold; the threshold is what the k-th best score so far proves. Rows outside
a query's range are dropped before they can count for anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from retrieval.bounds import Bound
from retrieval.canonical import Rows
from retrieval.mask import Vectors

_PENDING = 1 << 17
"""New candidates that are kept before thresholds are raised: a few MiB."""


@dataclass(frozen=True)
class Found:
    """Candidates, one per entry of three aligned arrays."""

    queries: NDArray[np.int64]
    """Indices into the batch."""
    rows: Rows
    scores: Vectors
    """As the scan gave them."""

    def at(self, places: NDArray[np.int64]) -> "Found":
        """These of them, in this order."""
        return Found(self.queries[places], self.rows[places], self.scores[places])


Settle = Callable[[int, Rows], tuple[Rows, Vectors] | None]
"""(query, its candidate rows) → at most k of them that alone can be in the answer, with scores within the bound; None: it is given up."""


class Candidates:
    """Of one batch of queries over the rows of one shard. Not thread-safe."""

    def __init__(
        self, ranges: NDArray[np.int64], k: int, bound: Bound, limit: int, settle: Settle, kth: NDArray[np.float64]
    ) -> None:
        """`ranges`: int64 [q, 2], [low, high) per query. `limit`: a query that holds more rows than this is settled.

        `kth`: [q], canonical scores; rows below them are not looked for.
        """
        self._ranges = ranges
        self._k = k
        self._bound = bound
        self._limit = limit
        self._settle = settle
        self._parts: list[Found] = []
        self._pending = 0
        self._seen_rows = 0
        self._raise_at = 0
        self.thresholds: Vectors = bound.least(kth)
        """One per query: only scores that reach it matter."""
        self.given_up: set[int] = set()
        """Queries that held too many rows."""

    def add(self, found: Found, rows: int) -> None:
        """What a block of `rows` rows gave."""
        low, high = self._ranges[found.queries].T
        visible = np.flatnonzero((found.rows >= low) & (found.rows < high))
        self._parts.append(found.at(visible))
        self._pending += len(visible)
        self._seen_rows += rows
        # thresholds are worth raising when the rows behind them have doubled
        if self._pending > _PENDING or self._seen_rows >= self._raise_at:
            self._raise_thresholds()
            self._raise_at = 2 * self._seen_rows

    def left(self) -> Found:
        """All that may be in an answer, by query, best score first; nothing of those given up."""
        return self._raise_thresholds()

    def _raise_thresholds(self) -> Found:
        """Everything that is left, by query, best score first."""
        found = _joined(self._parts)
        found = found.at(np.argsort(_query_then_score(found.queries, found.scores)))
        first = np.array([part.start for part in self._by_query(found)] + [len(found.rows)])
        full = np.flatnonzero(np.diff(first) >= self._k)
        kth = found.scores[first[full] + self._k - 1].astype(np.float64)
        self.thresholds[full] = np.maximum(self.thresholds[full], self._bound.threshold(full, kth))
        kept = self._settled(found.at(np.flatnonzero(found.scores >= self.thresholds[found.queries])))
        self._parts, self._pending = [kept], 0
        return kept

    def _settled(self, found: Found) -> Found:
        parts = self._by_query(found)
        crowded = {query for query, part in enumerate(parts) if part.stop - part.start > self._limit}
        if not crowded:
            return found
        settled = []
        for query, part in enumerate(parts):
            rows, scores = found.rows[part], found.scores[part]
            if query in crowded:
                best = self._settle(query, rows)
                if best is None:
                    self.given_up.add(query)
                    self.thresholds[query] = np.inf
                rows, scores = best or (rows[:0], scores[:0])
            settled.append(Found(np.full(len(rows), query), rows, scores))
        return _joined(settled)

    def _by_query(self, found: Found) -> list[slice]:
        """Where each query's candidates lie, in arrays that are sorted by query."""
        edges = np.searchsorted(found.queries, np.arange(len(self._ranges) + 1)).tolist()
        return [slice(a, b) for a, b in pairwise(edges)]


def _joined(parts: Sequence[Found]) -> Found:
    if not parts:
        return Found(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    return Found(
        np.concatenate([part.queries for part in parts]),
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


def _query_then_score(queries: NDArray[np.int64], scores: Vectors) -> NDArray[np.int64]:
    """One number per candidate that sorts by query, then by falling score: one vectorized sort instead of two."""
    bits = scores.view(np.int32)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    return (queries << 32) + (0x7FFFFFFF - rising)
