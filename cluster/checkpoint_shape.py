"""What a checkpoint's headers tell without reading a weight: whether it is whole, and whether another has the same shape.

Whatever cannot be read raises DataError that names the file. vLLM 0.31 does not notice most tensors that a checkpoint lacks and
serves whatever the memory held in their place.
"""

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.failures import DataError

_SAYS_NOTHING_OF_SHAPE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def same_shape(one: Path, other: Path) -> bool:
    """Same configuration, and tensors of the same names and shapes; False where that cannot be told (no safetensors)."""
    if _config(one) != _config(other):
        return False
    tensors = _tensors(one)
    return bool(tensors) and tensors == _tensors(other)


def incomplete(folder: Path) -> str:
    """What a checkpoint lacks of what it says of itself: a file cut short, a tensor that its index names; empty if nothing."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            opening = stream.read(8)
            length = struct.unpack("<Q", opening)[0] if len(opening) == 8 else file.stat().st_size
            if 8 + length > file.stat().st_size:
                return f"{file.name} is cut short within its header"
        with _reading(file):
            length, tensors = _header(file)
            ends = [t["data_offsets"][1] for t in tensors.values()]
            whole = 8 + length + max(ends, default=0)
        if file.stat().st_size < whole:
            return f"{file.name} is cut short: {file.stat().st_size} bytes of {whole}"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with _reading(index):
            named = json.loads(index.read_text())["weight_map"].keys()
        if lacking := sorted(named - _tensors(folder).keys()):
            return f"{len(lacking)} tensor(s) that its index names are in no file: {_first(lacking)}"
    return ""


def lost_tensors(old: Path, new: Path) -> str:
    """Tensors that `new` lacks although its configuration is that of `old`; empty if none, or if that cannot be told."""
    if _config(old) != _config(new):
        return ""
    # Tied to the embeddings, it may be saved or not.
    lacking = sorted(_tensors(old).keys() - _tensors(new).keys() - {"lm_head.weight"})
    return f"{len(lacking)} tensor(s) of this configuration are missing: {_first(lacking)}" if lacking else ""


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    with _reading(file):
        config: dict[str, Any] = dict(json.loads(file.read_text()))
    return {key: value for key, value in config.items() if key not in _SAYS_NOTHING_OF_SHAPE}


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → (dtype, shape), from the JSON header that opens every safetensors file."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with _reading(file):
            _, tensors = _header(file)
            found |= {name: (t["dtype"], tuple(t["shape"])) for name, t in tensors.items()}
    return found


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """(length of the header, what it says of each tensor)."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    return length, {name: tensor for name, tensor in header.items() if name != "__metadata__"}


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """What goes wrong within is that file's fault."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; copy or save the checkpoint again") from error
    except (ValueError, LookupError, AttributeError, TypeError, struct.error) as error:
        # A header that is JSON of another shape fails at whatever is looked up in it.
        raise DataError(
            f"{file} is not what its name says ({type(error).__name__}: {error}); copy or save the checkpoint again"
        ) from error
