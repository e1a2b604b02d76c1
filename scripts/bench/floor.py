"""What a machine can do at best, measured: how fast its cores read memory together, and how fast they multiply.

Each figure is the best of several ways and tries, warm, with as many threads as a scan has, over arrays that no cache holds: something
else that runs at the same time can only lower it. Neighbours of a
virtual machine take turns with its memory, so each round has a figure of its own.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from cluster.record import Record
from retrieval.mask import Vectors
from retrieval.workers import granted_cores

_READ_BYTES = 1 << 29
"""Of the array that is read: many times any processor's cache."""

_SIDE = 2_048
"""Of the matrices that are multiplied."""

_TRIES = 3

STEADY = 0.9
"""A median round below this share of the best one says that the machine was disturbed."""


class Floor(Record):
    """What the machine could do in one round."""

    bytes_per_s: float
    """The fastest of several ways to read memory with all threads."""
    flops_per_s: float
    """A large float32 matrix product."""

    def least_ms(self, highs: Sequence[int], dim: int) -> float:
        """The roofline: no float32 scan of these prefixes can take less than reading the longest or multiplying them all."""
        bytes_read, operations = 4 * dim * max(highs), 2 * dim * sum(highs)
        return 1e3 * max(bytes_read / self.bytes_per_s, operations / self.flops_per_s)


def best_of(floors: Sequence[Floor]) -> Floor:
    """The machine undisturbed, as far as any round shows it."""
    return Floor(
        bytes_per_s=max(floor.bytes_per_s for floor in floors), flops_per_s=max(floor.flops_per_s for floor in floors)
    )


def steadiness(floors: Sequence[Floor]) -> float:
    """The median round over the best one, of bandwidth or arithmetic, whichever is lower. At most 1."""
    best = best_of(floors)
    reading = float(np.median([floor.bytes_per_s for floor in floors])) / best.bytes_per_s
    return min(reading, float(np.median([floor.flops_per_s for floor in floors])) / best.flops_per_s)


def floor_meter(mapped: Vectors, read_bytes: int = _READ_BYTES) -> Callable[[], Floor]:
    """A measurement that can be repeated. `mapped`: rows as a scan reads them, read beside an array of our own."""
    threads = granted_cores()
    own = np.ones(read_bytes // 4, np.float32)
    flat = mapped.reshape(-1)[: read_bytes // 4]
    arrays = [own] if flat.nbytes < read_bytes else [own, flat]  # a smaller one might be read from a cache
    square = np.ascontiguousarray(np.resize(flat, (_SIDE, _SIDE)))
    pool = ThreadPoolExecutor(threads)

    def reading(array: Vectors, reader: Callable[[Vectors], object]) -> float:
        parts = np.array_split(array, 8 * threads)
        return array.nbytes / _seconds(lambda: list(pool.map(reader, parts)))

    def measure() -> Floor:
        with threadpool_limits(1, "blas"):
            speeds = [reading(array, reader) for array in arrays for reader in (_products, np.sum, _squares)]
        return Floor(bytes_per_s=max(speeds), flops_per_s=2 * _SIDE**3 / _seconds(lambda: square @ square))

    return measure


def cache_bytes() -> int:
    """The largest cache of the first processor; 0 where the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=0)


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


_AXIS = np.ones(384, np.float32)


def _products(part: Vectors) -> None:
    whole = part[: len(part) // len(_AXIS) * len(_AXIS)]
    np.einsum("nd,d->n", whole.reshape(-1, len(_AXIS)), _AXIS)


def _squares(part: Vectors) -> None:
    np.dot(part, part)
