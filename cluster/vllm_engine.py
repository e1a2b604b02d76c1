"""The only module that talks to vLLM's AsyncLLM: starts it, samples, loads adapters and other weights.

vLLM's exceptions end here: they do not survive pickling, and some are bare.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

from cluster.adapters import Adapter, AdapterError
from cluster.call import EngineFigures
from cluster.config import EngineSettings, SamplingSettings
from cluster.failures import InfrastructureError
from cluster.figures import FiguresLog
from cluster.record import Record
from cluster.standard_error import StandardError

logger = logging.getLogger(__name__)


class Sampled(Record):
    """What vLLM said to one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    """vLLM's own word: `stop`, `length`, `abort`, `error`, …"""
    cached_tokens: int
    prompt_ids: tuple[int, ...]
    """As vLLM reports that it saw them."""


def engine_options(settings: EngineSettings, seed: int) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs, besides the model."""
    ranks = settings.tensor_parallel * settings.pipeline_parallel
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        # Said outright: inside a placement group vLLM would take Ray for itself, over bundles that are not shaped for it.
        "distributed_executor_backend": "ray" if settings.nodes > 1 else "mp" if ranks > 1 else None,
        "enable_prefix_caching": True,
        "enforce_eager": settings.gpus == 0,
        # The trained-on log-probabilities are those of the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        # Only the loggers that vLLM brings along; ours keeps the figures.
        "disable_log_stats": True,
        # The engine is seeded, never a request: vLLM 0.31 on CPU dies of a seeded request.
        "seed": seed,
    }
    if settings.adapters:
        options |= {
            "enable_lora": True,
            "max_loras": settings.adapters,
            "max_cpu_loras": settings.adapters,
            "max_lora_rank": settings.adapter_rank,
        }
    return options | settings.options


class VllmEngine:
    """One AsyncLLM with its own processes."""

    def __init__(self, path: str, settings: EngineSettings, sampling: SamplingSettings, seed: int) -> None:
        """Blocks until the weights are loaded. Raises InfrastructureError `engine-start` with vLLM's reason if it cannot."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._sampling = sampling
        self._log = FiguresLog(time.monotonic)
        said = StandardError()
        try:
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(model=path, **engine_options(settings, seed)), stat_loggers=[lambda *_: self._log]
            )
        except Exception as error:
            # Whatever is wrong with a model, by whatever exception. What a process of vLLM raised is not in it, only on its output.
            why = said.last_error() or f"{type(error).__name__}: {error}"
            raise InfrastructureError(
                "engine-start", f"vLLM cannot serve {path}: {why}; more on node {socket.gethostname()} in {said.where}"
            ) from error
        self.max_model_len = int(self._llm.model_config.max_model_len)
        self.vocabulary = int(self._llm.model_config.get_vocab_size())

    def unfinished(self) -> int:
        """Requests that the engine still works on."""
        return int(self._llm.output_processor.get_num_unfinished_requests())

    def figures(self) -> EngineFigures:
        """How busy it is. Raises InfrastructureError `engine-lost` when its processes have died."""
        if self._llm.errored:
            raise InfrastructureError("engine-lost", "vLLM's processes have died")
        return self._log.figures(self.unfinished())

    async def sample(
        self,
        request_id: str,
        ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        adapter: Adapter | None,
        salt: str,
    ) -> Sampled:
        """Sample behind `ids`; only prompts of the same `salt` share cached prefixes.

        However it ends, the request is not running afterwards. Raises InfrastructureError `engine-lost` when the engine
        died, `engine-full` when vLLM's own queue limit is reached; RuntimeError, a bug, for what vLLM refuses otherwise.
        """
        from vllm import SamplingParams
        from vllm.exceptions import GracefulHTTPError, VLLMClientError
        from vllm.lora.request import LoRARequest
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
        lora = LoRARequest(adapter.name, adapter.number, adapter.path) if adapter else None
        final = None
        try:
            async for output in self._llm.generate(
                {"prompt_token_ids": list(ids), "cache_salt": salt}, parameters, request_id, lora_request=lora
            ):
                final = output
        except EngineDeadError as error:
            raise InfrastructureError("engine-lost", f"{type(error).__name__}: {error}") from None
        except EngineGenerateError as error:
            why = f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}"
            if self._llm.errored:
                raise InfrastructureError("engine-lost", why) from None
            # Whatever went wrong with this one request: the engine serves on, and must not be ended for it.
            raise RuntimeError(f"vLLM fails call {request_id}: {why}") from None
        except GracefulHTTPError as error:
            raise InfrastructureError("engine-full", f"{type(error).__name__}: {error}") from None
        except (ValueError, VLLMClientError) as error:
            raise RuntimeError(f"vLLM refuses call {request_id}: {type(error).__name__}: {error}") from None
        finally:
            if final is None:
                # vLLM aborts what is cancelled while it is sampled, but not while it is handed over.
                await asyncio.shield(self._llm.abort(request_id))
        if final is None:
            raise InfrastructureError("engine-lost", "the engine ended the request without an output")
        chosen = final.outputs[0]
        return Sampled(
            token_ids=tuple(chosen.token_ids),
            logprobs=tuple(step[i].logprob for step, i in zip(chosen.logprobs or (), chosen.token_ids, strict=True)),
            finish=chosen.finish_reason or "none",
            cached_tokens=final.num_cached_tokens or 0,
            prompt_ids=tuple(final.prompt_token_ids),
        )

    async def abort(self, request_id: str) -> None:
        """The request ends at once, with finish `abort`; unknown ones are ignored."""
        await self._llm.abort(request_id)

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache. Raises RuntimeError while requests run: their blocks cannot be forgotten."""
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied: are requests running?")

    async def add_adapter(self, adapter: Adapter) -> None:
        """Raises AdapterError with vLLM's reason if it cannot load it; the engine serves on."""
        from vllm.lora.request import LoRARequest

        try:
            added = await self._llm.add_lora(LoRARequest(adapter.name, adapter.number, adapter.path))
        except Exception as error:
            # A bare Exception is how vLLM passes on what a worker raised.
            raise AdapterError(f"vLLM cannot load adapter {adapter.name!r} from {adapter.path}: {error}") from error
        if not added:
            raise AdapterError(f"vLLM did not take adapter {adapter.name!r} from {adapter.path}, and does not say why")

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Its slot is free afterwards."""
        await self._llm.remove_lora(adapter.number)

    async def reload(self, path: str) -> bool:
        """Read other weights of the same shape into the running engine, and forget what it has cached.

        False if that failed: what it holds is then undefined, and it must not serve.
        """
        try:
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            return bool(await self._llm.reset_prefix_cache())
        except Exception as error:  # noqa: BLE001 - a bare Exception is how vLLM passes on what a worker raised
            logger.warning("weights could not be read in place, the engine is started anew: %s", error)
            return False

    def shutdown(self) -> None:
        """Ends the engine's processes; blocks until they are gone."""
        self._llm.shutdown()
