"""Rescorer: from what a scan found to an answer. The candidates of a whole batch are scored canonically and ordered at once."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from retrieval.bounds import Bound
from retrieval.candidates import Found
from retrieval.canonical import Ranked, Rows, Scores, canonical_scores, newest_first
from retrieval.mask import Vectors
from retrieval.workers import process_workers

_VALUES_PER_THREAD = 1 << 18
"""Values that are worth a second thread: a fraction of a millisecond of work."""


class Rescorer:
    """Scores rows of one shard canonically, and orders them."""

    def __init__(self, vectors: Vectors, first_rows: NDArray[np.int64]) -> None:
        """`vectors`: float32 [n, dimension]; `first_rows`: the first row of every day."""
        self._vectors = vectors
        self._first_rows = first_rows

    def best(self, query: Vectors, rows: Rows, k: int) -> Ranked:
        """The best k of these rows for one query, float32 [dimension]."""
        (answer,) = self.best_of_each(query[None, :], np.zeros(len(rows), np.int64), rows, k)
        return answer

    def best_of_each(self, queries: Vectors, asked: NDArray[np.int64], rows: Rows, k: int) -> list[Ranked]:
        """The best k rows of every query, out of the pairs (queries[asked[i]], rows[i]); none twice."""
        return self._ranked(asked, rows, self._scores(queries, asked, rows), len(queries), k)

    def finish(self, queries: Vectors, found: Found, bound: Bound, k: int) -> tuple[list[Ranked], int]:
        """The best k of each query's candidates, and how many of all had to be scored.

        `found`: by query, and by falling score within one. The k that look best are scored first; what their worst score proves hopeless
        is not scored at all. Raises InfrastructureError `retrieval-inexact` where a score breaks its bound.
        """
        asked, rows = found.queries, found.rows
        starts = np.searchsorted(asked, np.arange(len(queries) + 1))
        first = np.arange(len(rows)) - starts[asked] < k
        scores = np.empty(len(rows))
        scores[first] = self._scores(queries, asked[first], rows[first])
        worst = np.full(len(queries), np.inf)
        np.minimum.at(worst, asked[first], scores[first])
        rest = np.flatnonzero(~first)
        rest = rest[bound.reaches(asked[rest], found.scores[rest], worst[asked[rest]])]
        scores[rest] = self._scores(queries, asked[rest], rows[rest])
        scored = np.concatenate([np.flatnonzero(first), rest])
        bound.require(asked[scored], found.scores[scored], scores[scored])
        return self._ranked(asked[scored], rows[scored], scores[scored], len(queries), k), len(scored)

    def _scores(self, queries: Vectors, asked: NDArray[np.int64], rows: Rows) -> Scores:
        """One per (query, row)."""
        workers = process_workers()
        parts = max(1, min(workers.threads, rows.size * self._vectors.shape[1] // _VALUES_PER_THREAD))
        edges = np.linspace(0, len(rows), parts + 1).astype(int)
        slices = [slice(a, b) for a, b in pairwise(edges.tolist())]
        scored = workers.each(
            lambda i: canonical_scores(self._vectors, rows[slices[i]], queries, asked[slices[i]]), parts
        )
        return np.concatenate(scored)

    def _ranked(self, asked: NDArray[np.int64], rows: Rows, scores: Scores, queries: int, k: int) -> list[Ranked]:
        order = newest_first(asked, rows, scores, self._first_rows)
        edges = np.searchsorted(asked[order], np.arange(queries + 1)).tolist()
        ordered_rows, ordered_scores = rows[order], scores[order]
        return [
            Ranked(tuple(ordered_rows[a : min(a + k, b)].tolist()), tuple(ordered_scores[a : min(a + k, b)].tolist()))
            for a, b in pairwise(edges)
        ]
