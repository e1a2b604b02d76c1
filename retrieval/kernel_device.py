"""The scan on a GPU: float32 rows or their bfloat16 copy, uploaded once; only candidates come back.

Canonical scores are computed on the host from the float32 rows, so that answers are those of a CPU.
"""

from typing import Any, Literal

import numpy as np

from cluster.failures import SettingsError
from retrieval.blocks import Block, BlockSizes
from retrieval.bounds import Bound, Norms, bf16_bound, f32_bound
from retrieval.candidates import Found
from retrieval.half import Half, from_half, to_half
from retrieval.mask import Vectors
from retrieval.tensors import as_tensor
from retrieval.workers import Workers

_BLOCK_BYTES = 2 << 30
"""Of a block: enough that its product hides the launches around it. A few blocks make a shard."""

_UPLOAD_ROWS = 65_536

_caller = Workers(1)
"""One thread drives the device; its cores do the rest."""


def require_device(device: Literal["cpu", "cuda"]) -> None:
    """Raises SettingsError if this process sees no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            "retrieval.device is cuda, but this process sees no GPU; set retrieval.actor_gpus, or device to cpu"
        )


class DeviceKernel:
    """Implements `Kernel` with torch on a device."""

    def __init__(
        self, rows: Vectors | Half, norms: Norms, device: Literal["cpu", "cuda"], block_rows: int | None = None
    ) -> None:
        """`rows`: float32, or bfloat16 bits as uint16, [n, dimension]. Raises SettingsError if there is no such device.

        The device `cpu` is for tests: it takes the same path.
        """
        import torch

        require_device(device)
        # the bounds are those of IEEE float32 and of float32 accumulation
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._half = rows.dtype == np.uint16
        kind = torch.bfloat16 if self._half else torch.float32
        self._rows = torch.empty(rows.shape, dtype=kind, device=device)
        for start in range(0, len(rows), _UPLOAD_ROWS):
            part = as_tensor(rows[start : start + _UPLOAD_ROWS].view(np.int16 if self._half else np.float32))
            self._rows[start : start + len(part)] = part.view(kind)
        self._norms = norms
        self._device = device
        most = block_rows or max(4_096, _BLOCK_BYTES // (rows.itemsize * rows.shape[1]))
        self.sizes = BlockSizes(most, first=1_024, growth=16)

    def prepared(self, queries: Vectors) -> "_PreparedDevice":
        """See `Kernel`."""
        import torch

        if not self._half:
            return _PreparedDevice(
                self._rows, torch.from_numpy(queries).to(self._device), f32_bound(queries, self._norms)
            )
        rounded = from_half(to_half(queries))
        bound = bf16_bound(queries, rounded, self._norms, gpu=True)
        return _PreparedDevice(self._rows, torch.from_numpy(rounded).to(self._device, torch.bfloat16), bound)

    def workers(self) -> Workers:
        """See `Kernel`."""
        return _caller


class _PreparedDevice:
    def __init__(self, rows: Any, queries: Any, bound: Bound) -> None:
        self._rows = rows
        self._queries = queries
        self.bound = bound

    def reaching(self, block: Block, thresholds: Vectors) -> Found:
        """See `Prepared`."""
        import torch

        device = self._rows.device
        chosen = torch.from_numpy(block.queries).to(device)
        scores = torch.mm(self._rows[block.start : block.stop], self._queries[chosen].T)
        # in float32, where the thresholds were rounded down; bfloat16 would round them again
        reached = scores.float() >= torch.from_numpy(thresholds[block.queries]).to(device)
        row, query = torch.nonzero(reached, as_tuple=True)
        found = scores[row, query].float().cpu().numpy()
        return Found(block.queries[query.cpu().numpy()], block.start + row.cpu().numpy(), found)
