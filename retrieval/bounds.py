"""How far a fast score may lie from the canonical one: what makes a scan's candidates a proof.

With s the score of a matrix product and c the canonical score, `Bound` promises |s − c| ≤ absolute + relative·|s| for every row of the
shard. A row whose s lies below `threshold(kth best s)` therefore has k rows with a larger c, and cannot be in the answer.

The float32 scan. A product of n terms that is summed in any order, fused or not, errs by at most γₙ|x|·|q| with γₙ = n·u/(1 − n·u)
and u = 2⁻²⁴ (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5), and |x|·|q| ≤ ‖x‖‖q‖.

The bfloat16 scan. x̂ and q̂ are the stored copy and the rounded query. Products of two 8-bit significands are exact in float32, so
the accumulated v obeys |v − x̂·q̂| ≤ γₙ‖x̂‖‖q̂‖. Here u = 2⁻²³, or 2⁻²² on a GPU: vector units may sum pairs before they round, and
tensor cores truncate what they align to the largest of 16 products and the accumulator (Fasi, Higham, Mikaitis, Pranesh, Numerical
behavior of NVIDIA tensor cores, 2021), which is at most 17·2⁻²³ of the summed magnitudes for every 16 terms. Further,

    x̂·q̂ − x·q = x̂·(q̂ − q) + (x̂ − x)·q,   so   |x̂·q̂ − x·q| ≤ ‖x̂‖‖q̂ − q‖ + ‖x̂ − x‖‖q‖.

The four norms are measured, not assumed: a copy that is not the rounding of the rows only costs time. The product is written
as bfloat16, s = v(1 + δ) with |δ| ≤ 2⁻⁸, hence |v − s| ≤ |s|·2⁻⁸/(1 − 2⁻⁸). Both bounds add the canonical score's own error, and
what is lost where units flush numbers below 2⁻¹²⁶ to zero: at most 2⁻¹²⁶ per operation, and per value 2⁻¹²⁶ times its partner.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.failures import InfrastructureError
from retrieval.canonical import canonical_error
from retrieval.mask import LARGEST_VALUE, Vectors

F32_UNIT = 2.0**-24
BF16_UNIT = 2.0**-8

_NORM_SLACK = 1 + 1e-6
"""Norms are enlarged by more than their own error and that of the arithmetic below, which is float64."""

_CHUNK_ROWS = 8_192

_FLUSH = 2.0**-126


@dataclass(frozen=True)
class Norms:
    """What is known about the rows of a shard; each value is an upper bound."""

    row: float
    """Largest ‖x‖."""
    copy: float = 0.0
    """Largest ‖x̂‖ of the half-precision copy."""
    copy_error: float = 0.0
    """Largest ‖x̂ − x‖."""


@dataclass(frozen=True)
class Bound:
    """|s − c| ≤ absolute + relative·|s|, for each query of a batch."""

    absolute: NDArray[np.float64]
    """One per query."""
    relative: float

    def threshold(self, queries: NDArray[np.int64], kth: NDArray[np.float64]) -> Vectors:
        """Rows whose score lies below this cannot be among the best k of a query.

        `kth`: the k-th largest score that was found for each of `queries`. float32, rounded down.
        """
        lowest = kth - self.relative * np.abs(kth) - self.absolute[queries]
        return self._least(queries, lowest)

    def least(self, canonical: NDArray[np.float64]) -> Vectors:
        """The smallest score whose row can reach this canonical score, one per query of the batch. float32, rounded down."""
        return self._least(np.arange(len(canonical)), canonical)

    def require(self, queries: NDArray[np.int64], scores: Vectors, canonical: NDArray[np.float64]) -> None:
        """Raises InfrastructureError `retrieval-inexact` if one of these scores breaks the promise; three aligned arrays."""
        apart = np.abs(scores - canonical)
        allowed = self.absolute[queries] + self.relative * np.abs(scores.astype(np.float64))
        if not (apart <= allowed).all():
            worst = int(np.argmax(apart - allowed))
            raise InfrastructureError(
                "retrieval-inexact",
                f"a scan gave {scores[worst]:.9g} for a row that scores {canonical[worst]:.9g} and promised to err by at most"
                f" {allowed[worst]:.3g}: a library on this machine multiplies in lower precision than it was told; see docs/retrieval.md",
            )

    def reaches(self, queries: NDArray[np.int64], scores: Vectors, canonical: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which of these scores may belong to a row whose canonical score is at least `canonical`; three aligned arrays."""
        return scores >= self._least(queries, canonical)

    def _least(self, queries: NDArray[np.int64], canonical: NDArray[np.float64]) -> Vectors:
        """The smallest score whose row can reach this canonical score: the solution of s + relative·|s| + absolute = c."""
        rest = canonical - self.absolute[queries]
        least = np.where(rest >= 0, rest / (1 + self.relative), rest / (1 - self.relative))
        # casting to float32 may round up
        down: Vectors = np.nextafter(least.astype(np.float32), np.float32(-np.inf))
        return down


def f32_bound(queries: Vectors, norms: Norms) -> Bound:
    """Of float32 products, in any order of summation. `queries`: float32 [q, dimension]."""
    dimension = queries.shape[1]
    sizes = norm(queries)
    unit = _gamma(dimension, F32_UNIT) + canonical_error(dimension)
    return Bound(unit * sizes * norms.row + _flushed(dimension, sizes, norms.row), 0.0)


def bf16_bound(queries: Vectors, rounded: Vectors, norms: Norms, *, gpu: bool) -> Bound:
    """Of bfloat16 products with float32 accumulation. `rounded`: the queries' bfloat16 values, as float32."""
    dimension = queries.shape[1]
    sizes, rounded_sizes = norm(queries), norm(rounded)
    moved = norm(rounded.astype(np.float64) - queries.astype(np.float64))
    absolute = (
        _gamma(dimension, 2.0**-22 if gpu else 2.0**-23) * norms.copy * rounded_sizes
        + norms.copy * moved
        + norms.copy_error * sizes
        + canonical_error(dimension) * norms.row * sizes
        + _flushed(dimension, rounded_sizes, norms.copy)
    )
    return Bound(absolute, BF16_UNIT / (1 - BF16_UNIT))


def norm(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """float64 [n]: the length of every row, rounded up."""
    squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    lengths: NDArray[np.float64] = np.sqrt(squares) * _NORM_SLACK
    return lengths


def largest_norm(vectors: Vectors) -> float:
    """An upper bound of the length of every row. Raises ValueError with the row that is not finite or huge."""
    largest = 0.0
    for start in range(0, len(vectors), _CHUNK_ROWS):
        lengths = norm(vectors[start : start + _CHUNK_ROWS])
        unusable = ~(lengths <= LARGEST_VALUE)
        if unusable.any():
            raise ValueError(f"the vector of row {start + int(unusable.argmax())} holds NaN, infinity or a huge value")
        largest = max(largest, float(lengths.max()))
    return largest


def _gamma(terms: int, unit: float) -> float:
    return terms * unit / (1 - terms * unit)


def _flushed(dimension: int, sizes: NDArray[np.float64], row: float) -> NDArray[np.float64]:
    return dimension * _FLUSH * (2 + sizes + row)
