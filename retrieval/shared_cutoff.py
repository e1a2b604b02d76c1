"""Batches whose queries all see the same rows: FAISS multiplies and selects in one pass, and a certificate makes its answers exact.

`faiss.knn` returns the largest float32 scores of a run of rows; a few more are fetched than are asked for. They are scored canonically.
What was left out of a run scores at most as much as the worst that it returned, up to the float32 bound (`bounds.py`): where that cannot
reach the k-th canonical score, the answer is that of the scan. Other queries, and batches in which cutoffs differ, are scanned.
"""

from itertools import pairwise

import faiss
import numpy as np

from retrieval.bounds import Norms, f32_bound
from retrieval.candidates import Found
from retrieval.canonical import Rows
from retrieval.finder import Answers, Finder, Known, Ranges
from retrieval.mask import Vectors
from retrieval.rescorer import Rescorer
from retrieval.workers import process_workers

_MORE = 6
"""Rows fetched beyond k of each run: scores that lie closer together than the bound are rare, and one more costs nothing."""

_RUNS_PER_THREAD = 4
"""So that a thread that is disturbed does not keep the others waiting."""

TOGETHER = 4
"""Fewer queries are scanned at the speed of memory."""


class SharedCutoff:
    """Implements `Finder` over float32 rows on a CPU."""

    def __init__(
        self,
        vectors: Vectors,
        norms: Norms,
        rescorer: Rescorer,
        scan: Finder,
        *,
        together: int = TOGETHER,
    ) -> None:
        """`scan` answers what FAISS does not. `together`: fewest queries for FAISS; answers do not depend on it."""
        self._vectors = vectors
        self._norms = norms
        self._rescorer = rescorer
        self._scan = scan
        self._together = together
        # with fewer queries than this, FAISS multiplies each of them with each row by itself
        faiss.cvar.distance_compute_blas_threshold = 1

    def search(self, queries: Vectors, ranges: Ranges, k: int, known: Known) -> Answers:
        """See `Finder`."""
        low, high = (int(row) for row in ranges[0])
        if (
            len(queries) < self._together
            or low == high  # ends FAISS's process
            or (ranges != ranges[0]).any()
        ):
            return self._scan.search(queries, ranges, k, known)
        bound = f32_bound(queries, self._norms)
        found, left_out = _best_of_runs(self._vectors, queries, low, high, k + _MORE)
        ranked, rescored = self._rescorer.finish(queries, found, bound, k)
        kth = np.array([answer.scores[-1] for answer in ranked])
        unsure = np.flatnonzero(bound.reaches(np.arange(len(queries)), left_out, kth))
        if len(unsure):
            again = self._scan.search(queries[unsure], ranges[unsure], k, known.of(unsure.tolist()))
            for query, answer in zip(unsure.tolist(), again.ranked, strict=True):
                ranked[query] = answer
            rescored += again.rescored
        return Answers(tuple(ranked), rescored, 0)


def _best_of_runs(vectors: Vectors, queries: Vectors, low: int, high: int, wanted: int) -> tuple[Found, Vectors]:
    """The largest scores of every run of [low, high), by query and falling score; and the most that a row left out can have, per query."""
    workers = process_workers()
    edges = np.unique(np.linspace(low, high, _RUNS_PER_THREAD * workers.threads + 1).astype(int)).tolist()
    runs = list(pairwise(edges))
    todo = iter(enumerate(runs))
    scores: list[Vectors] = [np.empty(0, np.float32)] * len(runs)
    rows: list[Rows] = [np.empty(0, np.int64)] * len(runs)
    left_out = np.full((len(runs), len(queries)), -np.inf, np.float32)

    def work() -> None:
        faiss.omp_set_num_threads(1)  # of this thread: each multiplies runs of its own
        for at, (start, stop) in todo:
            count = min(wanted, stop - start)
            run = vectors[start:stop]
            scores[at], numbers = faiss.knn(queries, run, count, metric=faiss.METRIC_INNER_PRODUCT)
            rows[at] = start + numbers.astype(np.int64)
            if count < stop - start:
                left_out[at] = scores[at][:, -1]

    workers.run(work)
    all_scores, all_rows = np.concatenate(scores, axis=1), np.concatenate(rows, axis=1)
    order = np.argsort(-all_scores, axis=1)
    asked = np.repeat(np.arange(len(queries)), order.shape[1])
    ordered_rows, ordered_scores = np.take_along_axis(all_rows, order, 1), np.take_along_axis(all_scores, order, 1)
    return Found(asked, ordered_rows.reshape(-1), ordered_scores.reshape(-1)), left_out.max(axis=0)
