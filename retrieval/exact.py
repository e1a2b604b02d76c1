"""Exact masked search: a kernel scans the rows and proves which few can be in an answer; those are scored and ordered canonically.

The answer is that of scoring every visible row in float64 and sorting, for any batch, block, kernel and number of threads.
"""

import threading

import numpy as np

from retrieval.blocks import blocks
from retrieval.candidates import Candidates, Found, Settle
from retrieval.canonical import Rows
from retrieval.finder import Answers, Finder, Known, Ranges
from retrieval.kernel import Kernel
from retrieval.mask import Vectors
from retrieval.rescorer import Rescorer

_CROWD = 2_048
"""Candidates of one query beyond which it is settled or given up: scoring them would take longer than scanning."""


class Exact:
    """Implements `Finder` with a float32 kernel."""

    def __init__(self, rescorer: Rescorer, kernel: Kernel) -> None:
        self._rescorer = rescorer
        self._kernel = kernel

    def search(self, queries: Vectors, ranges: Ranges, k: int, known: Known) -> Answers:
        """See `Finder`."""

        def settle(query: int, rows: Rows) -> tuple[Rows, Vectors]:
            # thousands score alike: what is not among the best k of them now never will be
            best = self._rescorer.best(queries[query], rows, k)
            return np.array(best.rows, np.int64), np.array(best.scores, np.float32)

        return _search(self._kernel, self._rescorer, queries, ranges, k, known, settle)[0]


class Certified:
    """Implements `Finder` with a half-precision kernel: the answers of `Exact`, at half the memory traffic.

    A query with more candidates than the bound can tell apart is answered by the float32 scan and counted.
    """

    def __init__(self, rescorer: Rescorer, kernel: Kernel, exact: Finder) -> None:
        self._rescorer = rescorer
        self._kernel = kernel
        self._exact = exact

    def search(self, queries: Vectors, ranges: Ranges, k: int, known: Known) -> Answers:
        """See `Finder`."""
        answers, given_up = _search(self._kernel, self._rescorer, queries, ranges, k, known, lambda _query, _rows: None)
        if not given_up:
            return answers
        again = self._exact.search(queries[given_up], ranges[given_up], k, known.of(given_up))
        ranked = list(answers.ranked)
        for query, answer in zip(given_up, again.ranked, strict=True):
            ranked[query] = answer
        return Answers(tuple(ranked), answers.rescored + again.rescored, len(given_up))


def _search(
    kernel: Kernel, rescorer: Rescorer, queries: Vectors, ranges: Ranges, k: int, known: Known, settle: Settle
) -> tuple[Answers, list[int]]:
    """Answers, empty for queries that `settle` gave up, and the indices of these."""
    prepared = kernel.prepared(queries)
    candidates = Candidates(ranges, k, prepared.bound, max(_CROWD, 2 * k), settle, known.kth)
    todo = blocks(ranges, kernel.sizes, int(known.rows.min()))
    turn = threading.Lock()

    def work() -> None:
        found: Found | None = None
        rows = 0
        while True:
            with turn:
                if found is not None:
                    candidates.add(found, rows)
                block = next(todo, None)
                # other threads raise them meanwhile: an older threshold only lets more through
                thresholds = candidates.thresholds.copy()
            if block is None:
                return
            found, rows = prepared.reaching(block, thresholds), block.stop - block.start

    kernel.workers().run(work)
    ranked, rescored = rescorer.finish(queries, candidates.left(), prepared.bound, k)
    return Answers(tuple(ranked), rescored, 0), sorted(candidates.given_up)
