"""Finder: one way to search the rows of a shard. Each index kind has one (`exact.py`, `approximate.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.canonical import Ranked, Scores
from retrieval.mask import Vectors

Ranges = NDArray[np.int64]
"""[q, 2]: the rows [low, high) that each query may see, checked."""


@dataclass(frozen=True)
class Answers:
    """Of one batch."""

    ranked: tuple[Ranked, ...]
    """One per query."""
    rescored: int
    """Rows that were scored canonically."""
    fallbacks: int
    """Queries that a fast path could not answer, and an exact float32 scan did."""


@dataclass(frozen=True)
class Known:
    """What was found for each query of a batch before, in other shards."""

    kth: Scores
    """float64 [q]: the canonical score below which a row is not in the answer; −∞ where there is none yet."""
    rows: NDArray[np.int64]
    """[q]: how many rows that is based on."""

    @classmethod
    def nothing(cls, queries: int) -> "Known":
        """In the first shard of a search."""
        return cls(np.full(queries, -np.inf), np.zeros(queries, np.int64))

    def add(self, query: int, rows: int, best: Sequence[float], k: int) -> None:
        """Another shard is searched, of which the query sees `rows` rows; `best`: its largest scores in all shards so far, falling."""
        self.rows[query] += rows
        if len(best) >= k:
            self.kth[query] = best[k - 1]

    def of(self, queries: Sequence[int]) -> "Known":
        """Of these queries of the batch."""
        return Known(self.kth[queries], self.rows[queries])


class Finder(Protocol):
    """Searches within ranges that were checked."""

    def search(self, queries: Vectors, ranges: Ranges, k: int, known: Known) -> Answers:
        """The best min(k, high − low) rows of each query's range, except that an approximate finder may miss some of the best.

        Rows that score below `known.kth` of their query may be left out.
        """
