"""Whether two checkpoints are the same model with other numbers, told from their headers without reading a weight."""

import json
import struct
from pathlib import Path
from typing import Any

_SAYS_NOTHING_OF_SHAPE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def same_shape(one: Path, other: Path) -> bool:
    """Same configuration, and tensors of the same names and shapes; False where that cannot be told (no safetensors)."""
    if _config(one) != _config(other):
        return False
    tensors = _tensors(one)
    return bool(tensors) and tensors == _tensors(other)


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in _SAYS_NOTHING_OF_SHAPE}


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → (dtype, shape), from the JSON header that opens every safetensors file."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        found |= {name: (t["dtype"], tuple(t["shape"])) for name, t in header.items() if name != "__metadata__"}
    return found
