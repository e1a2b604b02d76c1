"""Which blocks of rows a scan multiplies, and with which queries. Pure.

Every block is read once for all queries whose range meets it. Blocks grow from small to full: nothing is known before the
first scores, so the first blocks only serve to find out what cannot be among the best.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FIRST_SCORES = 1 << 15
"""Of the first block, all of which are kept: the more queries, the fewer of its rows."""

_FEWEST_ROWS = 16


@dataclass(frozen=True)
class BlockSizes:
    """How many rows blocks have."""

    most: int
    first: int = 128
    growth: int = 2


@dataclass(frozen=True)
class Block:
    """Rows [start, stop), and the queries whose ranges meet them."""

    start: int
    stop: int
    queries: NDArray[np.int64]
    """Indices into the batch, at least one."""


def blocks(ranges: NDArray[np.int64], sizes: BlockSizes, known_rows: int = 0) -> Iterator[Block]:
    """Blocks of at most `sizes.most` rows that cover each of the ranges [low, high), int64 [q, 2], and no row that none covers.

    `known_rows`: how many rows of other shards have been searched for every query: the first block may be as large.
    """
    order = np.argsort(ranges[:, 1], kind="stable")
    order = order[ranges[order, 0] < ranges[order, 1]]
    if not len(order):
        return
    lows, highs = ranges[order, 0], ranges[order, 1]
    first = min(sizes.first, max(_FEWEST_ROWS, _FIRST_SCORES // len(order)))
    start, size = int(lows.min()), min(max(first, known_rows), sizes.most)
    while start < highs[-1]:
        stop = start + size
        meets = (highs > start) & (lows < stop)
        if meets.any():
            low, high = int(lows[meets].min()), int(highs[meets].max())
            yield Block(max(start, low), min(stop, high), order[meets])
            start = stop
        else:
            start = int(lows[lows >= stop].min())  # nobody asks for the rows between
        size = min(sizes.growth * size, sizes.most)
