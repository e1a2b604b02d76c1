"""NumPy's arrays in torch, and whether torch computes as exactly as the bounds of a scan assume."""

import os
import warnings
from typing import Any

from numpy.typing import NDArray


def as_tensor(rows: NDArray[Any]) -> Any:
    """The same memory as a tensor. torch warns that writing to read-only pages would fail, and nothing is ever written."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(rows)


def torch_is_exact() -> bool:
    """Whether torch multiplies float32 in float32 on the CPU now. Others in this process, and the environment, may have allowed it less."""
    import torch

    backends = torch.backends
    stated = (backends.mkldnn.matmul.fp32_precision, backends.mkldnn.fp32_precision, backends.fp32_precision)
    precision = next((p for p in stated if p != "none"), "ieee")
    modes = {os.environ.get(f"{prefix}_DEFAULT_FPMATH_MODE", "STRICT").upper() for prefix in ("ONEDNN", "DNNL")}
    return precision == "ieee" and modes == {"STRICT"}
