"""The bfloat16 scan on a CPU with torch: half the memory traffic of float32, and units that multiply twice as fast.

Each thread multiplies its own blocks of the memory-mapped copy.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.blocks import Block, BlockSizes
from retrieval.bounds import Bound, Norms, bf16_bound
from retrieval.candidates import Found
from retrieval.half import Half, from_half, to_half
from retrieval.kernel import at_least, positions
from retrieval.kernel_float import Scratch
from retrieval.mask import Vectors
from retrieval.tensors import as_tensor
from retrieval.workers import Workers, process_workers

_BLOCK_BYTES = 12 << 20
"""Of a block on the CPU; see `kernel_float`."""

_TRANSPOSED_UP_TO = 8
"""With so few queries the product (queries × rows) is faster, and turning its result around costs little."""

_LONG_ROW = 2_048
"""Values from which it is faster with any number of queries."""


class HalfKernel:
    """Implements `Kernel` over a bfloat16 copy on the CPU."""

    def __init__(self, half: Half, norms: Norms, block_rows: int | None = None) -> None:
        """`half`: bfloat16 bits, uint16 [n, dimension], C-ordered; kept, not copied."""
        import torch

        self._rows = as_tensor(half.view(np.int16)).view(torch.bfloat16)
        self._norms = norms
        self.sizes = BlockSizes(block_rows or max(128, _BLOCK_BYTES // (2 * half.shape[1]) // 128 * 128))

    def prepared(self, queries: Vectors) -> "_PreparedHalf":
        """See `Kernel`."""
        rounded = to_half(queries)
        bound = bf16_bound(queries, from_half(rounded), self._norms, gpu=False)
        return _PreparedHalf(self._rows, rounded, bound)

    def workers(self) -> Workers:
        """See `Kernel`."""
        workers = process_workers()
        workers.use_torch()
        return workers


class _PreparedHalf:
    def __init__(self, rows: Any, queries: Half, bound: Bound) -> None:
        self._rows = rows
        self._queries = queries
        self.bound = bound
        self._scratch = Scratch()

    def reaching(self, block: Block, thresholds: Vectors) -> Found:
        """See `Prepared`."""
        import torch

        rows, chosen = self._rows[block.start : block.stop], block.queries
        count, size = len(chosen), len(rows) * len(chosen)
        queries = torch.from_numpy(self._queries[chosen].view(np.int16)).view(torch.bfloat16)
        # half as long as float32 scores of the same number
        scores = torch.from_numpy(self._scratch.get_scores((size + 1) // 2)).view(torch.bfloat16)[:size]
        if count > 1 and (count <= _TRANSPOSED_UP_TO or rows.shape[1] >= _LONG_ROW):
            scores.view(len(rows), count).copy_(torch.mm(queries, rows.T).T)
        else:
            torch.mm(rows, queries.T.contiguous() if count == 1 else queries.T, out=scores.view(len(rows), count))
        bits: NDArray[np.int16] = scores.view(torch.int16).numpy()
        reached = self._scratch.get_reached(size)
        needed = thresholds[chosen]
        if needed.min() > 0:
            # numbers above zero are ordered as their bits, and cutting the lower half off a threshold rounds it down
            at_least(bits.reshape(len(rows), count), (needed.view(np.int32) >> 16).astype(np.int16), reached)
        else:
            at_least(from_half(bits.view(np.uint16)).reshape(len(rows), count), needed, reached)
        at = positions(reached)
        row, query = np.divmod(at, count)
        return Found(chosen[query], block.start + row, from_half(bits[at].view(np.uint16)))
