"""EngineActor: one vLLM engine behind a Ray actor. Ids in; ids and log-probabilities out.

It knows nothing of text, chats or forecasts. No request outlives its deadline, its caller or an abort, and none can
lose the engine: what is malformed is refused before vLLM sees it. Every answer says which weights gave it, and only
prompts of the same weights share cached prefixes.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import ray
from ray.exceptions import RayActorError, RayError

from cluster.adapters import AdapterError, AdapterShelf, check_adapter, with_adapter
from cluster.call import EngineCall, EngineFacts, EngineFigures, EngineOutput, ids_digest, tokens_allowed
from cluster.checkpoint_shape import incomplete, lost_tensors, same_shape
from cluster.clock import monotonic
from cluster.config import EngineSettings, SamplingSettings
from cluster.environment import process_environment, take_environment
from cluster.failures import InfrastructureError
from cluster.fingerprint import weights_hash
from cluster.gate import Gate
from cluster.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)

REMEMBERED_ABORTS = 10_000
"""Aborts that are kept in mind for calls which arrive after them."""


class EngineActor:
    """One replica. Made a Ray actor by the pool."""

    def __init__(
        self, path: str, weights: str, settings: EngineSettings, sampling: SamplingSettings, seed: int
    ) -> None:
        """Blocks until the engine can serve.

        Raises InfrastructureError `other-weights` unless the folder at `path` has the fingerprint `weights`,
        `weights-incomplete` for a cut checkpoint, `engine-start` with vLLM's reason when it cannot load it.
        """
        self._settings, self._sampling, self._seed = settings, sampling, seed
        self._path, self._weights = path, weights
        self._enter(path, weights)
        self._shelf = AdapterShelf(settings.adapters)
        self._gate = Gate()
        self._running: dict[str, EngineCall] = {}
        self._work: dict[str, asyncio.Task[EngineOutput]] = {}
        """What answers the running calls."""
        self._entered: set[str] = set()
        self._aborted: OrderedDict[str, str] = OrderedDict()
        self._lost_callers: set[str] = set()
        self._stopped = asyncio.Event()
        self._starts = 0
        self._start(path)

    def _enter(self, path: str, weights: str) -> None:
        """Make the node's process fit for the engine."""
        _take_environment(self._settings)
        _check_weights(path, weights)

    def _start(self, path: str) -> None:
        began = monotonic()
        # A seed of its own for every start: what was drawn before is not drawn again.
        seed = (self._seed + self._starts) % 2**32
        self._starts += 1
        self._engine = VllmEngine(path, self._settings, self._sampling, seed)
        self._start_seconds = monotonic() - began

    async def facts(self) -> EngineFacts:
        """Answers once the engine can serve."""
        return EngineFacts(
            weights=self._weights,
            max_model_len=self._engine.max_model_len,
            vocabulary=self._engine.vocabulary,
            node=socket.gethostname(),
            start_seconds=self._start_seconds,
        )

    async def figures(self) -> EngineFigures:
        """How busy the engine is. Raises InfrastructureError `engine-lost` when vLLM's processes have died under this one."""
        return self._engine.figures()

    async def unfinished(self) -> int:
        """Requests that the engine still works on."""
        return self._engine.unfinished()

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache: measurements start from here."""
        await self._engine.forget_prefixes()

    async def generate(self, call: EngineCall) -> EngineOutput:
        """Sample behind the call's ids, up to what it asks for and the context has room for.

        A full context is an answer, not an error: no ids, finish `length`. Raises InfrastructureError `engine-lost` when the
        engine died, `engine-time-out` when the call's deadline passed, `engine-aborted` when it was aborted, `no-adapter`
        when its adapter is not loaded here; ValueError for a malformed call, which is a bug of the caller.
        """
        allowed = tokens_allowed(call, self._engine.max_model_len, self._engine.vocabulary)
        if call.request_id in self._running:
            raise ValueError(f"a call named {call.request_id} is running already; names must be unique")
        # A task of its own: vLLM ignores the abort of a request that it has not taken over yet, and a task can be cancelled anywhere.
        work = asyncio.create_task(self._answer(call, allowed))
        self._running[call.request_id], self._work[call.request_id] = call, work
        try:
            async with asyncio.timeout(call.timeout_s):
                return await work
        except TimeoutError:
            raise InfrastructureError("engine-time-out", f"no answer in {call.timeout_s:g} s") from None
        except asyncio.CancelledError:
            if work.cancelled():
                self._refuse_aborted(call)
            raise
        finally:
            del self._running[call.request_id], self._work[call.request_id]

    async def _answer(self, call: EngineCall, allowed: int) -> EngineOutput:
        began = monotonic()
        async with self._gate.passing(call.adapter):
            self._entered.add(call.request_id)
            try:
                return await self._sample(call, allowed, began)
            finally:
                self._entered.discard(call.request_id)

    async def _sample(self, call: EngineCall, allowed: int, began: float) -> EngineOutput:
        self._refuse_aborted(call)
        adapter = self._shelf.find(call.adapter) if call.adapter else None
        if call.adapter and adapter is None:
            raise InfrastructureError("no-adapter", f"adapter {call.adapter!r} is not loaded in this engine")
        weights = with_adapter(self._weights, adapter.files if adapter else "")
        if allowed == 0:
            return EngineOutput(
                token_ids=(),
                logprobs=(),
                finish="length",
                cached_tokens=0,
                prompt_digest=ids_digest(call.ids),
                weights=weights,
                seconds=0.0,
            )
        sampled = await self._engine.sample(call.request_id, call.ids, allowed, call.stop_ids, adapter, weights)
        if sampled.finish not in ("stop", "length"):
            self._refuse_aborted(call)
            raise InfrastructureError("engine-aborted", f"vLLM ended the request with {sampled.finish!r}")
        return EngineOutput(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish="stop" if sampled.finish == "stop" else "length",
            cached_tokens=sampled.cached_tokens,
            prompt_digest=ids_digest(sampled.prompt_ids),
            weights=weights,
            seconds=monotonic() - began,
        )

    def _refuse_aborted(self, call: EngineCall) -> None:
        """Also of a call that arrives after its abort or after its caller's death."""
        if call.request_id in self._aborted:
            raise InfrastructureError("engine-aborted", self._aborted[call.request_id])
        if call.caller in self._lost_callers:
            raise InfrastructureError("engine-aborted", "its caller has died")

    async def abort(self, request_id: str, why: str = "its caller gave it up") -> None:
        """The request ends at once with `engine-aborted`, also if it has not arrived yet."""
        self._aborted[request_id] = why
        if len(self._aborted) > REMEMBERED_ABORTS:
            self._aborted.popitem(last=False)
        if (work := self._work.get(request_id)) is not None:
            work.cancel()
        await self._engine.abort(request_id)

    async def watch(self, caller: str, alive: Sequence[ray.ObjectRef]) -> None:
        """Aborts the calls of `caller` when it dies.

        `alive` holds one reference that the caller owns and that never resolves while the engine runs (`until_stopped`): Ray
        tells a borrower when the owner of what it waits for is gone.
        """
        try:
            await alive[0]
        except RayActorError:
            # The caller lost sight of this engine for a moment, and lives to say so. It introduces itself again.
            return
        except RayError:
            self._lost_callers.add(caller)
            left = [r for r, call in self._running.items() if call.caller == caller]
            logger.warning("a caller of this engine died; %d of its calls are aborted", len(left))
            for request_id in left:
                await self.abort(request_id, "its caller has died")

    async def until_stopped(self) -> None:
        """Answers when the engine is shut down; see `watch`."""
        await self._stopped.wait()

    async def load_adapter(self, name: str, path: str) -> str:
        """Load a LoRA adapter under a name; returns the fingerprint of the base with it.

        The same bytes under the same name are loaded once. Other bytes under a known name replace it when its calls have
        ended; calls that come meanwhile wait. Raises AdapterError that says why it cannot be loaded; what was there before stays.
        """
        check_adapter(Path(path))
        files = await asyncio.to_thread(weights_hash, Path(path))
        async with self._gate.closed(name):
            held = self._shelf.find(name)
            if held is None or held.files != files:
                fresh = self._shelf.prepare(name, path, files)
                if held is not None:
                    await self._engine.remove_adapter(held)
                try:
                    await self._engine.add_adapter(fresh)
                    if await asyncio.to_thread(weights_hash, Path(path)) != files:
                        await self._engine.remove_adapter(fresh)
                        raise AdapterError(f"{path} was changed while it was loaded; load it again when it is written")
                except AdapterError:
                    if held is not None:
                        await self._engine.add_adapter(held)
                    raise
                self._shelf.put(fresh)
            return with_adapter(self._weights, files)

    async def unload_adapter(self, name: str) -> None:
        """Frees the adapter's slot when its calls have ended. Raises AdapterError if there is none of that name."""
        async with self._gate.closed(name):
            await self._engine.remove_adapter(self._shelf.drop(name))

    async def adapters(self) -> dict[str, str]:
        """Name → fingerprint of the base with that adapter."""
        return self._shelf.fingerprints(self._weights)

    async def reload(self, path: str, weights: str) -> str:
        """Replace the base weights by those at `path`; returns their fingerprint once they serve.

        Running calls have `engine.drain_timeout_s` to end and are then aborted; calls that come meanwhile wait. Adapters are
        unloaded: they belonged to the other base. Weights of the same shape are read into the running engine, others need
        a new one. Raises InfrastructureError `other-weights`, or DataError that names a file which cannot be read, and nothing
        has changed, or InfrastructureError `reload-failed`, and the old weights serve again.
        """
        await asyncio.to_thread(_check_weights, path, weights)
        if lost := await asyncio.to_thread(lost_tensors, Path(self._path), Path(path)):
            raise InfrastructureError("reload-failed", f"{path}: {lost}; save the whole model")
        alike = await asyncio.to_thread(same_shape, Path(self._path), Path(path))
        async with self._drained():
            for name in self._shelf.fingerprints(self._weights):
                await self._engine.remove_adapter(self._shelf.drop(name))
            if not (alike and await self._engine.reload(path)):
                await self._start_again(path)
            self._path, self._weights = path, weights
            return weights

    async def _start_again(self, path: str) -> None:
        await asyncio.to_thread(self._engine.shutdown)
        try:
            await asyncio.to_thread(self._start, path)
        except InfrastructureError as error:
            # The engine must not stay empty.
            await asyncio.to_thread(self._start, self._path)
            raise InfrastructureError("reload-failed", error.detail) from error

    @contextlib.asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Alone with the engine."""
        patience = asyncio.create_task(self._abort_late())
        try:
            async with self._gate.closed():
                patience.cancel()
                yield
        finally:
            patience.cancel()

    async def _abort_late(self) -> None:
        await asyncio.sleep(self._settings.drain_timeout_s)
        for request_id in tuple(self._entered):
            await self.abort(
                request_id, f"it ran on for {self._settings.drain_timeout_s:g} s when weights were to change"
            )

    def shutdown(self) -> None:
        """Stop the engine's own processes."""
        self._stopped.set()
        self._engine.shutdown()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _check_weights(path: str, weights: str) -> None:
    found = weights_hash(Path(path))
    if found != weights:
        raise InfrastructureError(
            "other-weights",
            f"{path} on node {socket.gethostname()} has the fingerprint {found[:12]}, the run's is {weights[:12]}; "
            "prepare the same model on every node, or name one on shared storage",
        )

    if lack := incomplete(Path(path)):
        raise InfrastructureError("weights-incomplete", f"{path}: {lack}; copy or save it again")


def _take_environment(settings: EngineSettings) -> None:
    devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", []) if settings.gpus else []
    take_environment(process_environment(os.environ, settings, cores(), devices))
