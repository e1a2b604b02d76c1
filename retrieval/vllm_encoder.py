"""VllmEncoder: a sentence-transformers folder in vLLM's pooling runner, for models too large for anything else.

It takes over its process (environment, threads), so it lives in a Ray actor of its own. Pooling and normalization are the folder's own
(`modules.json`); vectors equal those of `LocalEncoder` up to the precision of `encoder.vllm.dtype`.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config import EncoderSettings, EngineSettings
from cluster.environment import process_environment, take_environment
from cluster.failures import InfrastructureError
from cluster.standard_error import StandardError
from retrieval.encoder import encodable, folder_fingerprint
from retrieval.mask import Vectors


class VllmEncoder:
    """An `Encoder`. Blocks while it starts; one caller at a time."""

    def __init__(self, path: Path, settings: EncoderSettings) -> None:
        """Raises SettingsError if the folder is not there, InfrastructureError `encoder-start` with vLLM's reason if it cannot serve it."""
        self.name = path.name
        self.fingerprint = folder_fingerprint(path)
        self.query_template = settings.queries
        take_environment(_environment_here(settings))
        from vllm import LLM

        said = StandardError()
        try:
            self._llm: Any = LLM(model=str(path), **pooling_options(settings))
        except Exception as error:
            # Whatever is wrong with a model, by whatever exception; what a process of vLLM raised is only on its output.
            why = said.last_error() or f"{type(error).__name__}: {error}"
            raise InfrastructureError(
                "encoder-start",
                f"vLLM cannot pool with {path}: {why}; more on node {socket.gethostname()} in {said.where}",
            ) from error
        self.dimension = len(self._pooled(["A text."])[0])

    def encode(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dimension], unit rows; a text beyond the model's length is cut by its tokenizer."""
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        vectors = np.asarray(self._pooled([encodable(text) for text in texts]), np.float64)
        unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        return unit

    def _pooled(self, texts: list[str]) -> list[list[float]]:
        try:
            answers = self._llm.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
        except Exception as error:
            # An engine that failed once is not asked again: its actor is started anew, or the build resumed.
            raise InfrastructureError("encoder-lost", f"{self.name}: {type(error).__name__}: {error}") from error
        return [answer.outputs.embedding for answer in answers]


def pooling_options(settings: EncoderSettings) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`, besides the model."""
    ours = settings.vllm
    options: dict[str, Any] = {
        "runner": "pooling",
        "dtype": ours.dtype,
        "max_model_len": ours.max_model_len,
        "tensor_parallel_size": ours.tensor_parallel,
        "enforce_eager": settings.gpus == 0,
        "disable_log_stats": True,
    }
    return options | ours.options


def pooling_environment(
    settings: EncoderSettings, inherited: Mapping[str, str], devices: Sequence[str]
) -> dict[str, str]:
    """The whole environment of an encoder's process: an engine's, with the engine inside the process where one GPU or the CPU serves."""
    ours = settings.vllm
    engine = EngineSettings(
        gpus=settings.gpus,
        tensor_parallel=ours.tensor_parallel,
        threads=ours.threads,
        kv_cache_gib=ours.kv_cache_gib,
        # Nothing is left behind when the actor is killed.
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | ours.environment,
    )
    return process_environment(inherited, engine, max(1, int(settings.cpus)), devices)


def _environment_here(settings: EncoderSettings) -> dict[str, str]:
    devices: list[str] = []
    if settings.gpus:
        import ray

        devices = [str(i) for i in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
    return pooling_environment(settings, os.environ, devices)
