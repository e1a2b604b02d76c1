"""What each index kind searches with, on a CPU or on a GPU. All of them answer alike, except `approximate`, which may miss rows."""

import numpy as np

from cluster.config import Device
from retrieval.bounds import Norms, largest_norm
from retrieval.days import DayTable
from retrieval.exact import Certified, Exact
from retrieval.finder import Finder
from retrieval.half import Half, copy_norms
from retrieval.kernel import Kernel
from retrieval.kernel_device import DeviceKernel
from retrieval.kernel_float import FloatKernel
from retrieval.kernel_half import HalfKernel
from retrieval.mask import Vectors
from retrieval.rescorer import Rescorer

_WIDE = 1_024
"""From so many dimensions on, one pass of FAISS takes 0.6 to 0.9 of the scan's time where cutoffs coincide; with 384 it takes as long."""


def exact_finder(vectors: Vectors, days: DayTable, device: Device = "cpu", block_rows: int | None = None) -> Finder:
    """The float32 scan, on a CPU with FAISS where that is faster. Answers do not depend on `device` and `block_rows`.

    Raises ValueError for vectors that cannot be ranked, SettingsError where there is no such device.
    """
    norms = Norms(row=largest_norm(vectors))
    scorer = rescorer(vectors, days)
    if device != "cpu":
        return Exact(scorer, DeviceKernel(vectors, norms, device, block_rows))
    scan = Exact(scorer, FloatKernel(vectors, norms, block_rows))
    if vectors.shape[1] < _WIDE:
        return scan
    from retrieval.shared_cutoff import SharedCutoff  # FAISS, which nothing else of this kind needs

    return SharedCutoff(vectors, norms, scorer, scan)


def certified_finder(
    vectors: Vectors, half: Half, days: DayTable, device: Device = "cpu", block_rows: int | None = None
) -> Certified:
    """The half-precision scan with the answers of `exact_finder`. `half`: bfloat16 bits of the vectors.

    What it gives up is scanned in float32 on the CPU. Raises as `exact_finder` does, and for a copy of another shape.
    """
    norms = copy_norms(vectors, half)
    scorer = rescorer(vectors, days)
    on_cpu = device == "cpu"
    kernel: Kernel = HalfKernel(half, norms, block_rows) if on_cpu else DeviceKernel(half, norms, device, block_rows)
    return Certified(scorer, kernel, Exact(scorer, FloatKernel(vectors, norms, block_rows)))


def rescorer(vectors: Vectors, days: DayTable) -> Rescorer:
    """Of a shard with this day table."""
    return Rescorer(vectors, np.asarray(days.first_rows))
