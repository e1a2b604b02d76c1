"""The half-precision copy of a shard's vectors: bfloat16, the upper half of a float32, kept as 16-bit integers."""

import numpy as np
from numpy.typing import NDArray

from retrieval.bounds import Norms, largest_norm, norm
from retrieval.mask import Vectors

Half = NDArray[np.uint16]

_CHUNK_ROWS = 4_096


def to_half(values: Vectors) -> Half:
    """bfloat16 bits of finite float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: Half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def from_half(half: Half) -> Vectors:
    """The float32 values of bfloat16 bits, exactly."""
    values: Vectors = (half.astype(np.uint32) << 16).view(np.float32)
    return values


def half_copy(vectors: Vectors, into: Half | None = None) -> Half:
    """`to_half` of a whole shard, without the intermediate copies of one. `into`: a mapped file of that shape; None: memory."""
    half = np.empty(vectors.shape, np.uint16) if into is None else into
    for start in range(0, len(vectors), _CHUNK_ROWS):
        half[start : start + _CHUNK_ROWS] = to_half(vectors[start : start + _CHUNK_ROWS])
    return half


def copy_norms(vectors: Vectors, half: Half) -> Norms:
    """What the error bound needs to know about rows and their copies, measured.

    Raises ValueError if the copy has another shape, or a row of either is not finite or huge.
    """
    if half.shape != vectors.shape or half.dtype != np.uint16 or not half.flags.c_contiguous:
        raise ValueError(f"the half-precision copy is {half.dtype} {half.shape}, the vectors are {vectors.shape}")
    copy, error = 0.0, 0.0
    for start in range(0, len(vectors), _CHUNK_ROWS):
        values = from_half(half[start : start + _CHUNK_ROWS])
        copy = max(copy, largest_norm(values))
        # exact where the copy is the rounding of the row; elsewhere float32 would round, hence float64
        difference = values.astype(np.float64) - vectors[start : start + _CHUNK_ROWS]
        error = max(error, float(norm(difference).max()))
    return Norms(row=largest_norm(vectors), copy=copy, copy_error=error)
