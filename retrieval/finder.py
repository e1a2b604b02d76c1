"""Finder: one way to search the rows of a shard. Each index kind has one (`exact.py`, `approximate.py`)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.canonical import Ranked
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


class Finder(Protocol):
    """Searches within ranges that were checked."""

    def search(self, queries: Vectors, ranges: Ranges, k: int) -> Answers:
        """The best min(k, high − low) rows of each query's range, except that an approximate finder may miss some of the best."""
