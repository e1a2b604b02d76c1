"""The float32 scan on a CPU: products of memory-mapped rows, summed in float32.

No library multiplies tall blocks of rows with any number of queries fastest. One query is read at the speed of memory by `einsum`,
a few by torch's `linear` (MKL), more by oneDNN, which reads the rows where they lie while a BLAS copies them first. Which one it is
moves scores within the bound, and never an answer. Where somebody allowed torch to compute float32 products in a lower precision, as
engines and trainers do, the bound would not hold, and NumPy multiplies alone.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.blocks import Block, BlockSizes
from retrieval.bounds import Bound, Norms, f32_bound
from retrieval.candidates import Found
from retrieval.kernel import at_least, positions
from retrieval.mask import Vectors
from retrieval.tensors import as_tensor, torch_is_exact
from retrieval.workers import Workers, process_workers

_BLOCK_BYTES = 16 << 20
"""Of a block: large enough that its product hides what is done per block, small enough to leave its scores in cache."""

_SHORT_ROW = 1_024
"""Values up to which `einsum` multiplies one query faster than BLAS."""

_FEW_VALUES = 3_072
"""Of all queries together, up to which `linear` is faster than oneDNN: 8 queries of 384 dimensions, 4 of 768."""

_SMALL_BLOCK = 1 << 20
"""Values; oneDNN prepares itself for every shape that it has not seen, which takes longer than to multiply so few."""


class FloatKernel:
    """Implements `Kernel` over float32 rows."""

    def __init__(self, vectors: Vectors, norms: Norms, block_rows: int | None = None) -> None:
        """`vectors`: float32 [n, dimension], finite, C-ordered; kept, not copied."""
        self._rows = FloatRows(vectors, as_tensor(vectors))
        self._norms = norms
        self.sizes = BlockSizes(block_rows or max(128, _BLOCK_BYTES // (4 * vectors.shape[1]) // 128 * 128))

    def prepared(self, queries: Vectors) -> "_PreparedFloat":
        """See `Kernel`."""
        return _PreparedFloat(self._rows, queries, f32_bound(queries, self._norms))

    def workers(self) -> Workers:
        """See `Kernel`."""
        workers = process_workers()
        workers.use_torch()
        return workers


@dataclass(frozen=True)
class FloatRows:
    """Rows of a shard, for NumPy and for torch."""

    array: Vectors
    """float32 [n, dimension]."""
    tensor: Any
    """The same memory."""

    def __getitem__(self, rows: slice) -> "FloatRows":
        return FloatRows(self.array[rows], self.tensor[rows])

    def __len__(self) -> int:
        return len(self.array)


@dataclass
class Scratch(threading.local):
    """Arrays that each thread writes again and again: fresh ones would cost page faults."""

    scores: Vectors | None = None
    reached: NDArray[np.bool_] | None = None

    def get_scores(self, size: int) -> Vectors:
        """float32 [size]."""
        if self.scores is None or len(self.scores) < size:
            self.scores = np.empty(size, np.float32)
        return self.scores[:size]

    def get_reached(self, size: int) -> NDArray[np.bool_]:
        """bool [size]."""
        if self.reached is None or len(self.reached) < size:
            self.reached = np.empty(size, np.bool_)
        return self.reached[:size]


class _PreparedFloat:
    def __init__(self, rows: FloatRows, queries: Vectors, bound: Bound) -> None:
        self._rows = rows
        self._queries = queries
        self.bound = bound
        self._scratch = Scratch()
        self._with_torch = torch_is_exact()

    def reaching(self, block: Block, thresholds: Vectors) -> Found:
        """See `Prepared`."""
        rows, chosen = self._rows[block.start : block.stop], block.queries
        size = len(rows) * len(chosen)
        out = self._scratch.get_scores(size).reshape(len(rows), len(chosen))
        scores = product(rows, self._queries[chosen], out, with_torch=self._with_torch)
        reached = self._scratch.get_reached(size)
        at_least(scores, thresholds[chosen], reached)
        at = positions(reached)
        row, query = np.divmod(at, len(chosen))
        return Found(chosen[query], block.start + row, scores.reshape(-1)[at])


def product(rows: FloatRows, queries: Vectors, out: Vectors, *, with_torch: bool) -> Vectors:
    """rows · queriesᵀ, float32 [n, q], C-ordered, in `out` or elsewhere, by whatever is fastest for these shapes."""
    count, dimension = queries.shape
    if count == 1 and dimension <= _SHORT_ROW:
        return np.einsum("nd,md->nm", rows.array, queries, out=out)
    if with_torch and 1 < count <= _FEW_VALUES // dimension:
        return _linear(rows, queries)
    if with_torch and count > 1 and rows.array.size >= _SMALL_BLOCK and (onednn := _onednn()) is not None:
        return onednn(rows, queries)
    return np.matmul(rows.array, queries.T, out=out)


def _linear(rows: FloatRows, queries: Vectors) -> Vectors:
    import torch

    scores: Vectors = torch.nn.functional.linear(rows.tensor, torch.from_numpy(queries)).numpy()
    return scores


@cache
def _onednn() -> Callable[[FloatRows, Vectors], Vectors] | None:
    """`linear` as torch compiles it for models on a CPU; None where this torch was built without oneDNN."""
    import torch

    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    linear = torch.ops.mkldnn._linear_pointwise

    def multiply(rows: FloatRows, queries: Vectors) -> Vectors:
        scores: Vectors = linear(rows.tensor, torch.from_numpy(queries), None, "none", [], "").numpy()
        return scores

    return multiply
