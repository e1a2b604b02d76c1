"""The one score of a (row, query) pair, and the order of an answer: score, then newer day, then id.

Matrix products round differently with the batch, the block and the machine's library; they only find candidates. What
is returned is scored and ordered here, so that an answer is the same whatever was searched together.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieval.mask import Vectors

F64_UNIT = 2.0**-53

_CHUNK_VALUES = 1 << 20
"""Values scored at once: 8 MiB of float64."""

Rows = NDArray[np.int64]
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Ranked:
    """The answer to one query, best first."""

    rows: tuple[int, ...]
    scores: tuple[float, ...]
    """One per row, canonical."""


def canonical_scores(vectors: Vectors, rows: Rows, queries: Vectors, asked: NDArray[np.int64]) -> Scores:
    """float64 [len(rows)]: the inner product of each of these float32 rows with its query, `queries[asked[i]]`, float32.

    Products of float32 are exact in float64; a row is summed pairwise, in an order that depends on the dimension alone.
    Vectors that differ in one last bit of float32 are told apart.
    """
    wide = queries.astype(np.float64)
    scores = np.empty(len(rows), np.float64)
    step = max(1, _CHUNK_VALUES // vectors.shape[1])
    for start in range(0, len(rows), step):
        products = vectors[rows[start : start + step]].astype(np.float64)
        products *= wide[asked[start : start + step]]
        products.sum(axis=1, out=scores[start : start + step])
    return scores


def canonical_error(dimension: int) -> float:
    """How far a canonical score may lie from the inner product, per unit of ‖row‖‖query‖ (Higham 2002, eq. 3.5)."""
    return dimension * F64_UNIT / (1 - dimension * F64_UNIT)


def newest_first(
    asked: NDArray[np.int64], rows: Rows, scores: Scores, first_rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The order of (query, row) pairs, aligned arrays: by query, then score, newer day, lower row.

    `first_rows`: the first row of every day, from which a row's day is known.
    """
    days = np.searchsorted(first_rows, rows, side="right")
    order: NDArray[np.int64] = np.lexsort((rows, -days, -scores, asked))
    return order
