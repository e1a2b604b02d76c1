"""Sentence encoders: texts in, unit vectors out, and a fingerprint of the bytes that made them.

An index names the fingerprint of its encoder; whoever searches it must encode with the same one. Nothing here
downloads anything.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.failures import SettingsError
from cluster.home import model_path

Vectors = NDArray[np.float32]

HASHING = "hashing"
"""The encoder name that needs no prepared folder."""

_TOKEN = re.compile(r"\w+")
_NOT_WEIGHTS = {"prepared.json"}
"""Files in an encoder's folder that do not change its vectors (notes in Markdown and hidden files do not either)."""


class Encoder(Protocol):
    """What turns texts into vectors."""

    @property
    def name(self) -> str:
        """For people: the prepared encoder's name."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the vectors depend on."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""

    def encode(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dimension], every row of unit length."""


class LocalEncoder:
    """A sentence-transformers folder on this machine's CPU.

    The last bits of a vector depend on which texts are encoded together (padding, matrix shapes); nothing else does.
    """

    def __init__(self, path: Path, batch_size: int = 64) -> None:
        """Raises SettingsError if the folder is not there."""
        self.name = path.name
        self.fingerprint = folder_fingerprint(path)
        # torch and transformers take seconds to import, and most of this package does not need them
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self._model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
        self._batch_size = batch_size
        self.dimension = int(self._model.get_embedding_dimension())

    def encode(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dimension], unit rows; a text beyond the model's length is cut by its tokenizer."""
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        vectors = self._model.encode(
            [encodable(text) for text in texts],
            batch_size=self._batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


class HashingEncoder:
    """A bag of words hashed to signed buckets (feature hashing): lexical, instant, and the same on every machine.

    For trying a pipeline where no encoder is prepared. It knows no synonyms, so it is no substitute for a sentence encoder.
    """

    name = HASHING

    def __init__(self, dimension: int = 256) -> None:
        self.dimension = dimension
        self.fingerprint = hashlib.sha256(f"hashing-1 {dimension}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dimension], unit rows; a text without words lies on the first axis."""
        vectors = np.zeros((len(texts), self.dimension), np.float64)
        for row, text in zip(vectors, texts, strict=True):
            for token in _TOKEN.findall(encodable(text).lower()):
                digest = int.from_bytes(hashlib.blake2b(token.encode(), digest_size=8).digest(), "little")
                row[(digest >> 1) % self.dimension] += 1.0 if digest & 1 else -1.0
        vectors[~vectors.any(axis=1), 0] = 1.0
        unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        return unit


def open_encoder(name: str, batch_size: int = 64) -> Encoder:
    """The encoder that `index.encoder` names: `hashing`, a prepared name, or a sentence-transformers folder.

    Raises SettingsError if there is none.
    """
    return HashingEncoder() if name == HASHING else LocalEncoder(model_path(name), batch_size)


def encodable(text: str) -> str:
    """The text with lone surrogates replaced: a model can emit them as JSON escapes, and tokenizers refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def folder_fingerprint(path: Path) -> str:
    """SHA-256 over names and bytes of the files that an encoder's vectors depend on.

    Raises SettingsError if the folder holds no sentence-transformers model.
    """
    if not (path / "modules.json").is_file():
        raise SettingsError(
            f"encoder {path}: no sentence-transformers folder (modules.json is missing); "
            "run `make setup`, or point index.encoder at one"
        )
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        inside = file.relative_to(path)
        hidden = any(part.startswith(".") for part in inside.parts)
        if hidden or file.suffix == ".md" or file.name in _NOT_WEIGHTS:
            continue
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{inside.as_posix()} {content}\n".encode())
    return digest.hexdigest()
