"""EngineActor: one vLLM AsyncLLM behind a Ray actor. Ids in; ids and log-probabilities out.

It knows nothing of text, chats or forecasts. A request that outlives its deadline is aborted at the engine. Exceptions of
vLLM become ours here, because they do not survive pickling.
"""

import asyncio
import hashlib
import os
import socket
import time
import uuid
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from cluster.config import EngineSettings, SamplingSettings
from cluster.failures import InfrastructureError
from cluster.fingerprint import weights_hash
from cluster.record import Record


class EngineOutput(Record):
    """What one request produced."""

    token_ids: tuple[int, ...]
    """Sampled ids, including a stop token."""
    logprobs: tuple[float, ...]
    """One per sampled id, nats, under the distribution it was drawn from (after temperature and truncation)."""
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int
    """Prompt tokens served from the prefix cache."""
    prompt_digest: str
    """`ids_digest` of the prompt as vLLM reports that it saw it."""
    seconds: float


class EngineFacts(Record):
    """What an engine says of itself once it can serve."""

    weights: str
    """Fingerprint of the folder it loaded."""
    max_model_len: int
    start_seconds: float


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment of an engine's process; it does not inherit the launcher's thread settings."""
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "1"}
    if settings.gpus == 0:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment


class EngineActor:
    """One replica. Made a Ray actor by the pool."""

    def __init__(
        self, path: str, weights: str, settings: EngineSettings, sampling: SamplingSettings, seed: int
    ) -> None:
        if settings.gpus == 0:
            # Ray sets this to the actor's cores, rounded down to 1; the engine's own process inherits it at its start.
            os.environ["OMP_NUM_THREADS"] = str(settings.threads or max(1, cores() // settings.replicas))
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        began = time.monotonic()
        options: dict[str, Any] = {
            "dtype": settings.dtype,
            "max_model_len": settings.max_model_len,
            "enable_prefix_caching": True,
            "enforce_eager": settings.gpus == 0,
            # The trained-on log-probabilities are those of the distribution that was sampled from.
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            # The engine is seeded, never a request: vLLM 0.31 on CPU dies of a seeded request.
            "seed": seed,
        } | settings.options
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **options))
        self._settings = settings
        self._sampling = sampling
        loaded = weights_hash(Path(path))
        if loaded != weights:
            raise InfrastructureError(
                "other-weights",
                f"{path} on node {socket.gethostname()} has the fingerprint {loaded[:12]}, the run's is {weights[:12]}; "
                "prepare the same model on every node, or name one on shared storage",
            )
        self._facts = EngineFacts(
            weights=loaded, max_model_len=settings.max_model_len, start_seconds=time.monotonic() - began
        )

    async def facts(self) -> EngineFacts:
        """Answers once the engine can serve."""
        return self._facts

    async def unfinished(self) -> int:
        """Requests that the engine still works on."""
        return int(self._engine.output_processor.get_num_unfinished_requests())

    async def generate(self, ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> EngineOutput:
        """Sample up to `max_tokens` behind `ids`.

        Raises InfrastructureError: `engine-lost` when the engine died, `engine-time-out` when the deadline passed
        (the request is aborted), `engine-refused` when vLLM does not take the request.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        parameters = SamplingParams(
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            max_tokens=max_tokens,
            stop_token_ids=list(stop_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                final = None
                async for output in self._engine.generate(
                    {"prompt_token_ids": list(ids)}, parameters, request_id=uuid.uuid4().hex
                ):
                    final = output
        except TimeoutError as error:
            raise InfrastructureError(
                "engine-time-out", f"no answer in {self._settings.request_timeout_s:g} s"
            ) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise InfrastructureError("engine-lost", str(error)) from None
        except (ValueError, VLLMValidationError) as error:
            raise InfrastructureError("engine-refused", str(error)) from None
        if final is None:
            raise InfrastructureError("engine-lost", "the engine ended the request without an output")
        chosen = final.outputs[0]
        logprobs = tuple(step[i].logprob for step, i in zip(chosen.logprobs, chosen.token_ids, strict=True))
        return EngineOutput(
            token_ids=tuple(chosen.token_ids),
            logprobs=logprobs,
            finish=chosen.finish_reason if chosen.finish_reason in ("stop", "length") else "abort",
            cached_tokens=final.num_cached_tokens or 0,
            prompt_digest=ids_digest(final.prompt_token_ids),
            seconds=time.monotonic() - began,
        )

    def shutdown(self) -> None:
        """Stop the engine's own processes."""
        self._engine.shutdown()


def ids_digest(ids: Sequence[int]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_loadable(path: Path) -> None:
    """Raises InfrastructureError if the folder cannot be a model: said before an engine is started."""
    if not (path / "config.json").is_file():
        raise InfrastructureError(
            "model-missing", f"{path} is not a model folder (no config.json); run `make setup` or set model.path"
        )
