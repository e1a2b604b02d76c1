"""What a search may touch: row ranges [low, high), a number of answers and queries, checked before anything is scored.

Rows of a shard are in date order, so the mask of a query is two row numbers. A range that does not lie in the shard is refused and never
repaired: a negative end, taken as a slice, would expose the future, and a crossed one ends FAISS's process.
"""

import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

MAXIMUM_K = 1_000
"""Most rows one query may ask for; beyond it the answer would be a copy of the corpus."""

LARGEST_VALUE = 1e12
"""Unit vectors are expected; beyond this the products could overflow float32 and rank as infinity."""


def check_k(k: int) -> None:
    """Raises ValueError unless 1 ≤ k ≤ MAXIMUM_K."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAXIMUM_K:
        raise ValueError(f"top k must be a whole number from 1 to {MAXIMUM_K}, not {k!r}")


def check_queries(queries: Vectors, dimension: int) -> Vectors:
    """The queries as a C-ordered matrix. Raises ValueError unless they are finite float32 [q, dimension]."""
    if not isinstance(queries, np.ndarray) or queries.dtype != np.float32:
        found = queries.dtype if isinstance(queries, np.ndarray) else type(queries).__name__
        raise ValueError(f"queries must be a float32 array, not {found}")
    if queries.ndim != 2 or queries.shape[1] != dimension:
        raise ValueError(f"queries must be float32 [q, {dimension}], not {list(queries.shape)}")
    if not np.isfinite(queries).all() or np.abs(queries).max(initial=0) > LARGEST_VALUE:
        raise ValueError("a query vector holds NaN, infinity or a huge value, so its scores would not rank")
    return np.ascontiguousarray(queries)


def check_ranges(ranges: Sequence[tuple[int, int]], queries: int, rows: int) -> NDArray[np.int64]:
    """int64 [queries, 2]: the ranges [low, high). Raises ValueError unless there is one per query, with 0 ≤ low ≤ high ≤ rows."""
    if len(ranges) != queries:
        raise ValueError(f"{queries} queries but {len(ranges)} row ranges")
    checked = np.empty((queries, 2), np.int64)
    for i, (low, high) in enumerate(ranges):
        try:
            low, high = operator.index(low), operator.index(high)
        except TypeError as error:
            raise ValueError(f"row range [{low!r}, {high!r}) is not made of whole numbers") from error
        if not 0 <= low <= high <= rows:
            raise ValueError(f"row range [{low}, {high}) does not lie in [0, {rows}]")
        checked[i] = low, high
    return checked
