"""Sentence encoders: texts in, unit vectors out, and the facts that say which encoder it was.

An index names the facts of its encoder; whoever searches it must encode with the same one. Nothing here
downloads anything.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.config import EncoderSettings
from cluster.failures import SettingsError
from cluster.home import model_path
from retrieval.manifest import AS_IT_IS, EncoderFacts

Vectors = NDArray[np.float32]

HASHING = "hashing"
"""The encoder name that needs no prepared folder."""
HASHING_DIMENSION = 256

_LOCAL = EncoderSettings()
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

    @property
    def query_template(self) -> str:
        """What a query becomes before it is encoded; `{query}` stands for it."""

    def encode(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dimension], every row of unit length. Texts are encoded as they are."""


def encoder_facts(encoder: Encoder) -> EncoderFacts:
    """Which encoder it is."""
    return EncoderFacts(
        name=encoder.name,
        fingerprint=encoder.fingerprint,
        dimension=encoder.dimension,
        query_template=encoder.query_template,
    )


def encode_queries(encoder: Encoder, queries: Sequence[str]) -> Vectors:
    """As `encode`, of the queries with the encoder's instruction; articles never get one."""
    return encoder.encode([encoder.query_template.replace("{query}", query) for query in queries])


class LocalEncoder:
    """A sentence-transformers folder, on this machine's CPU or GPU.

    The last bits of a vector depend on which texts are encoded together (padding, matrix shapes) and on the threads; nothing else does.
    """

    def __init__(self, path: Path, batch_size: int = 64, query_template: str = AS_IT_IS, device: str = "cpu") -> None:
        """Raises SettingsError if the folder is not there, or there is no such device."""
        self.name = path.name
        self.fingerprint = folder_fingerprint(path)
        self.query_template = query_template
        # torch and transformers take seconds to import, and most of this package does not need them
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

        if device == "cuda" and not torch.cuda.is_available():
            raise SettingsError(
                f"encoder {path.name}: encoder.gpus asks for a GPU, but torch sees none here; set it to 0"
            )
        transformers_logging.disable_progress_bar()
        self._model = SentenceTransformer(str(path), device=device, local_files_only=True)
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

    def __init__(self, dimension: int = HASHING_DIMENSION, query_template: str = AS_IT_IS) -> None:
        self.dimension = dimension
        self.query_template = query_template
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


def open_encoder(name: str, batch_size: int = 64, settings: EncoderSettings = _LOCAL) -> Encoder:
    """The encoder that `index.encoder` names: `hashing`, a prepared name, a sentence-transformers folder, or a server's model.

    Raises SettingsError if there is none, or it is not what `encoder` says.
    """
    if settings.kind == "remote":
        from retrieval.remote_encoder import RemoteEncoder  # the openai client, which only this kind needs

        return RemoteEncoder(name, batch_size, settings)
    encoder: Encoder
    if name == HASHING:
        encoder = HashingEncoder(settings.dimension or HASHING_DIMENSION, settings.queries)
    elif settings.kind == "vllm":
        from retrieval.vllm_encoder import VllmEncoder  # vLLM, which takes over its process

        encoder = VllmEncoder(model_path(name), settings)
    else:
        device = "cuda" if settings.gpus else "cpu"
        encoder = LocalEncoder(model_path(name), batch_size, settings.queries, device)
    _require_dimension(encoder_facts(encoder), settings)
    return encoder


def facts_of(name: str, settings: EncoderSettings = _LOCAL) -> EncoderFacts:
    """The facts of the encoder that `open_encoder` would open, without loading it. Raises SettingsError if there is none."""
    if settings.kind == "remote":
        from retrieval.remote_encoder import remote_facts

        return remote_facts(name, settings)
    if name == HASHING:
        return encoder_facts(HashingEncoder(settings.dimension or HASHING_DIMENSION, settings.queries))
    path = model_path(name)
    facts = EncoderFacts(
        name=path.name,
        fingerprint=folder_fingerprint(path),
        dimension=folder_dimension(path),
        query_template=settings.queries,
    )
    _require_dimension(facts, settings)
    return facts


def located(name: str, settings: EncoderSettings = _LOCAL) -> str:
    """`name` for a process with another working directory: the whole path where it names a folder."""
    return name if name == HASHING or settings.kind == "remote" else str(model_path(name).resolve())


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


def folder_dimension(path: Path) -> int:
    """Length of the vectors of a sentence-transformers folder, as its modules say: the last one that gives a length decides.

    Raises SettingsError if none does.
    """
    try:
        modules = json.loads((path / "modules.json").read_bytes())
        for module in reversed(modules):
            file = path / module["path"] / "config.json"
            config = json.loads(file.read_bytes()) if file.is_file() else {}
            for key in ("out_features", "word_embedding_dimension", "embedding_dimension", "hidden_size"):
                if isinstance(config.get(key), int):
                    return int(config[key])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"encoder {path}: modules.json or what it names cannot be read: {error}") from error
    raise SettingsError(f"encoder {path}: none of its modules says how long its vectors are; prepare the folder again")


def _require_dimension(facts: EncoderFacts, settings: EncoderSettings) -> None:
    if settings.dimension not in (None, facts.dimension):
        raise SettingsError(
            f"encoder {facts.name} gives vectors of {facts.dimension} dimensions, but encoder.dimension is {settings.dimension}; "
            "drop it or take another encoder"
        )
