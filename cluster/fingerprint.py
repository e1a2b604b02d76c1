"""Fingerprints of files: equal ones mean the same bytes under the same names, wherever the folder lies."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

_MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".bin")


def hash_files(files: Iterable[Path], root: Path) -> str:
    """SHA-256 over names (relative to `root`) and bytes of files, in order of name."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def weights_hash(folder: Path) -> str:
    """Fingerprint of a model folder: weights, configuration, tokenizer and chat template."""
    return hash_files((f for f in folder.iterdir() if f.is_file() and f.suffix in _MODEL_FILES), folder)
