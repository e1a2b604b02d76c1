"""One publication month, searched: vectors in (day, id) order, so that what a query may see is a row range [low, high).

Everything that comes in is checked here, whatever the index kind; what goes out is ordered by score, then newer day, then id.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrieval.canonical import Ranked
from retrieval.days import DayTable
from retrieval.finder import Finder, Known
from retrieval.kinds import exact_finder
from retrieval.mask import Vectors, check_k, check_queries, check_ranges


@dataclass(frozen=True)
class SearchCounts:
    """What the searches of a shard took so far."""

    queries: int = 0
    ranged: int = 0
    """Rows in the queries' ranges, added up over the queries."""
    rescored: int = 0
    """Rows that were scored canonically."""
    fallbacks: int = 0
    """Queries that the kind's fast path could not answer, and an exact float32 scan did."""


class Shard:
    """Vectors of one month with their day table."""

    def __init__(self, vectors: Vectors, days: DayTable, finder: Finder | None = None) -> None:
        """`vectors`: float32 [n, dimension], finite, rows as in `days`; kept, not copied. `finder`: None searches exactly.

        Raises ValueError if they do not fit together.
        """
        check_vectors(vectors)
        if len(vectors) != days.rows:
            raise ValueError(f"{len(vectors)} vectors, but the day table has {days.rows} rows")
        self._vectors = vectors
        self.days = days
        self._finder = finder or exact_finder(vectors, days)
        self._counting = threading.Lock()
        self.counts = SearchCounts()

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._vectors.shape[1])

    def __len__(self) -> int:
        return self.days.rows

    def search(
        self, queries: Vectors, ranges: Sequence[tuple[int, int]], k: int, known: Known | None = None
    ) -> list[Ranked]:
        """The best min(k, high − low) rows of each query's range [low, high).

        `queries`: [q, dimension], finite; `ranges`: one per query, 0 ≤ low ≤ high ≤ rows. Ties go to the newer day, then to
        the lower row, which is the lower id. `known`: what other shards gave; rows that score below its `kth` may be left out.
        Raises ValueError for anything else, InfrastructureError `retrieval-inexact` if this machine multiplies less exactly than
        the scan assumes.
        """
        queries = check_queries(queries, self.dimension)
        check_k(k)
        checked = check_ranges(ranges, len(queries), len(self))
        if not len(queries):
            return []
        answers = self._finder.search(queries, checked, k, known or Known.nothing(len(queries)))
        with self._counting:
            self.counts = SearchCounts(
                self.counts.queries + len(queries),
                self.counts.ranged + int((checked[:, 1] - checked[:, 0]).sum()),
                self.counts.rescored + answers.rescored,
                self.counts.fallbacks + answers.fallbacks,
            )
        return list(answers.ranked)


def check_vectors(vectors: Vectors) -> None:
    """Raises ValueError unless this is a C-ordered float32 matrix."""
    if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.flags.c_contiguous or not vectors.shape[1]:
        raise ValueError(f"vectors must be a C-ordered float32 matrix, not {vectors.dtype} {vectors.shape}")
