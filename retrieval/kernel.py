"""Kernel: what multiplies blocks of rows with queries and keeps what reaches a threshold.

A kernel only finds: its scores may differ from the canonical ones by the bound that it states. There is one for float32 rows on a CPU
(`kernel_float.py`), one for their half-precision copy there (`kernel_half.py`), and one for a GPU (`kernel_device.py`).
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.blocks import Block, BlockSizes
from retrieval.bounds import Bound
from retrieval.candidates import Found
from retrieval.mask import Vectors
from retrieval.workers import Workers


class Prepared(Protocol):
    """The queries of one batch, ready to be multiplied. Blocks may be asked for by several threads at once."""

    bound: Bound

    def reaching(self, block: Block, thresholds: Vectors) -> Found:
        """Rows of the block, of all its queries, whose score reaches its query's threshold; ranges are not looked at.

        `thresholds`: float32, one per query of the batch.
        """


class Kernel(Protocol):
    """The rows of one shard."""

    sizes: BlockSizes
    """Of the blocks that it multiplies best."""

    def prepared(self, queries: Vectors) -> Prepared:
        """The batch; `queries`: finite float32 [q, dimension], at least one."""

    def workers(self) -> Workers:
        """The threads that may ask for blocks."""


def positions(reached: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where a long, mostly false array is true. Looks at eight values at once."""
    whole = len(reached) // 8 * 8
    groups = reached[:whole].reshape(-1, 8)
    hit = np.flatnonzero(reached[:whole].view(np.uint64) != 0)
    group, place = np.nonzero(groups[hit])
    return np.concatenate([hit[group] * 8 + place, whole + np.flatnonzero(reached[whole:])])


def at_least(scores: NDArray[np.generic], thresholds: NDArray[np.generic], out: NDArray[np.bool_]) -> None:
    """out[i·m + j] = scores[i, j] ≥ thresholds[j], for `scores` [n, m], C-ordered.

    Rows of a few values are compared many at a time: a broadcast over short rows takes several times as long.
    """
    rows, count = scores.shape
    together = max(1, min(rows, 2048 // count))
    whole = rows // together * together
    tiled = np.tile(thresholds, together)
    np.greater_equal(scores[:whole].reshape(-1, len(tiled)), tiled, out=out[: whole * count].reshape(-1, len(tiled)))
    np.greater_equal(scores[whole:], thresholds, out=out[whole * count :].reshape(-1, count))
