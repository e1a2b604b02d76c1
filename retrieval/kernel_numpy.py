"""The float32 scan on a CPU with NumPy: exact products of memory-mapped rows, summed in float32."""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieval.blocks import Block, BlockSizes
from retrieval.bounds import Bound, Norms, f32_bound
from retrieval.candidates import Found
from retrieval.kernel import at_least, positions
from retrieval.mask import Vectors
from retrieval.workers import Workers, process_workers

_BLOCK_BYTES = 16 << 20
"""Of a block: large enough that its product hides what is done per block, small enough to leave its scores in cache."""

_FEW_QUERIES, _SHORT_ROW = 3, 1_024
"""Up to here `einsum` runs at the speed of memory, twice as fast as BLAS, which is made for longer rows and more queries."""


class NumpyKernel:
    """Implements `Kernel` over float32 rows."""

    def __init__(self, vectors: Vectors, norms: Norms, block_rows: int | None = None) -> None:
        """`vectors`: float32 [n, dimension], finite, C-ordered; kept, not copied."""
        self._vectors = vectors
        self._norms = norms
        self.sizes = BlockSizes(block_rows or max(128, _BLOCK_BYTES // (4 * vectors.shape[1]) // 128 * 128))

    def prepared(self, queries: Vectors) -> "_PreparedNumpy":
        """See `Kernel`."""
        return _PreparedNumpy(self._vectors, queries, f32_bound(queries, self._norms))

    def workers(self) -> Workers:
        """See `Kernel`."""
        return process_workers()


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


class _PreparedNumpy:
    def __init__(self, vectors: Vectors, queries: Vectors, bound: Bound) -> None:
        self._vectors = vectors
        self._queries = queries
        self.bound = bound
        self._scratch = Scratch()

    def reaching(self, block: Block, thresholds: Vectors) -> Found:
        """See `Prepared`."""
        rows, chosen = self._vectors[block.start : block.stop], block.queries
        size = len(rows) * len(chosen)
        scores = self._scratch.get_scores(size).reshape(len(rows), len(chosen))
        if len(chosen) <= _FEW_QUERIES and rows.shape[1] <= _SHORT_ROW:
            np.einsum("nd,md->nm", rows, self._queries[chosen], out=scores)
        else:
            np.matmul(rows, self._queries[chosen].T, out=scores)
        reached = self._scratch.get_reached(size)
        at_least(scores, thresholds[chosen], reached)
        at = positions(reached)
        row, query = np.divmod(at, len(chosen))
        return Found(chosen[query], block.start + row, scores.reshape(-1)[at])
