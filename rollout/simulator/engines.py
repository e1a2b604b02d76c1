"""The real EngineActor over a simulated vLLM: answers late, wrongly, never, or with the death of its process.

It decodes as many requests side by side as it has slots, keeps the others waiting, and counts figures of its own, so
that the pool adapts to something.
"""

import asyncio
from collections.abc import Callable, Sequence

from cluster.adapters import Adapter
from cluster.call import EngineFacts, EngineFigures
from cluster.config import Settings
from cluster.engine import EngineActor
from cluster.failures import InfrastructureError
from cluster.vllm_engine import Sampled, VllmEngine
from rollout.simulator.faults import MARKER, Faults
from rollout.simulator.script import ScriptedSampler
from rollout.simulator.tools import SILENCE

TOKEN_SECONDS = 0.02
KV_TOKENS = 6_000
"""Tokens that the cache of one engine holds."""
SLOTS = 6
"""Requests that one engine decodes at once."""
VOCABULARY = 1_000_000


class SimulatedVllm(VllmEngine):
    """Samples from a script."""

    def __init__(
        self, name: str, length: int, sampler: ScriptedSampler, faults: Faults, die: Callable[[], None]
    ) -> None:
        """`die` ends the engine's process."""
        # The real constructor loads weights.
        self.max_model_len = length
        self.vocabulary = VOCABULARY
        self._name, self._sampler, self._faults, self._die = name, sampler, faults, die
        self._slots = asyncio.Semaphore(SLOTS)
        self._running: dict[str, asyncio.Event] = {}
        self._held: dict[str, int] = {}
        self._generated = self._preemptions = 0

    def unfinished(self) -> int:
        """Requests that it still works on."""
        return len(self._running)

    def figures(self) -> EngineFigures:
        """Its load; at times too old to be used."""
        use = sum(self._held.values()) / KV_TOKENS
        self._preemptions += use > 1
        return EngineFigures(
            running=len(self._held),
            waiting=len(self._running) - len(self._held),
            kv_cache_use=min(1.0, use),
            preemptions=self._preemptions,
            generated_tokens=self._generated,
            age_s=1e6 if self._faults.strikes("engine-figures-old", self._name) else 0.0,
        )

    async def sample(
        self,
        request_id: str,
        ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],  # noqa: ARG002 - the real one's signature
        adapter: Adapter | None,  # noqa: ARG002
        salt: str,  # noqa: ARG002
    ) -> Sampled:
        """As the real one; however it ends, the request is not running afterwards."""
        aborted = self._running[request_id] = asyncio.Event()
        try:
            work = asyncio.ensure_future(self._decode(request_id, ids, max_tokens))
            stop = asyncio.ensure_future(aborted.wait())
            try:
                await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                return Sampled(token_ids=(), logprobs=(), finish="abort", cached_tokens=0, prompt_ids=tuple(ids))
            finally:
                work.cancel()
                stop.cancel()
        finally:
            self._running.pop(request_id, None)
            self._held.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        """Unknown ones are ignored."""
        if request_id in self._running:
            self._running[request_id].set()

    async def add_adapter(self, adapter: Adapter) -> None:
        """Always fits."""

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Gone."""

    def shutdown(self) -> None:
        """Nothing is left running."""
        for aborted in self._running.values():
            aborted.set()

    async def _decode(self, request_id: str, ids: Sequence[int], max_tokens: int) -> Sampled:
        faults, name = self._faults, self._name
        chance = faults.stream("engine")
        async with self._slots:
            if faults.strikes("engine-full", name):
                raise InfrastructureError("engine-full", f"{MARKER}: its queue is full")
            if faults.strikes("engine-refuses", name):
                raise RuntimeError(f"{MARKER}: vLLM refuses the call")
            sampled, finish = self._sampler.sample(ids, max_tokens, chance)
            seconds = TOKEN_SECONDS * (1 + len(sampled)) * chance.uniform(0.5, 2)
            if faults.strikes("engine-late", name):
                seconds *= chance.uniform(5, 300)
            if faults.strikes("engine-silent", name):
                seconds = SILENCE
            self._held[request_id] = len(ids) + len(sampled)
            await asyncio.sleep(seconds)
            if faults.strikes("engine-dies-answering", name):
                if chance.random() < 0.5:
                    raise InfrastructureError("engine-lost", f"{MARKER}: EngineDeadError")
                self._die()
                await asyncio.sleep(SILENCE)
            self._generated += len(sampled)
            seen = ids[:-1] if faults.strikes("engine-wrong-prompt", name) else ids
            return Sampled(
                token_ids=sampled,
                logprobs=(-0.5,) * len(sampled),
                finish=finish,
                cached_tokens=0,
                prompt_ids=tuple(seen),
            )


class SimulatedEngine(EngineActor):
    """One replica on simulated hardware."""

    def __init__(
        self,
        weights: str,
        settings: Settings,
        seed: int,
        name: str,
        node: str,
        sampler: ScriptedSampler,
        faults: Faults,
        die: Callable[[], None],
    ) -> None:
        """`weights`: the fingerprint of what it loads; `die` ends its process."""
        self._name, self._node, self._sampler, self._faults, self._die = name, node, sampler, faults, die
        super().__init__("", weights, settings.engine, settings.sampling, seed)

    def _enter(self, path: str, weights: str) -> None:
        """No environment, no files."""

    def _start(self, path: str) -> None:  # noqa: ARG002 - the real one's signature
        self._engine = SimulatedVllm(self._name, self._settings.max_model_len, self._sampler, self._faults, self._die)
        self._start_seconds = 0.0

    @property
    def weights(self) -> str:
        """What it really holds."""
        return self._weights

    def contexts(self) -> list[tuple[int, ...]]:
        """Of the requests that have not ended."""
        return [call.ids for call in self._running.values()]

    async def facts(self) -> EngineFacts:
        """As the real one, on a simulated node."""
        return (await super().facts()).model_copy(update={"node": self._node})

    async def figures(self) -> EngineFigures:
        """Late while it is busy, and by faults; at times never."""
        chance = self._faults.stream("probe")
        seconds = chance.uniform(0.001, 0.05) * (1 + len(self._running))
        if self._faults.strikes("probe-late", self._name, times=1 + len(self._running) / SLOTS):
            seconds = chance.uniform(1, 60)
        if self._faults.strikes("probe-lost", self._name):
            seconds = SILENCE
        await asyncio.sleep(seconds)
        return await super().figures()

    async def reload(self, path: str, weights: str) -> str:  # noqa: ARG002 - the real one's signature
        """Holds other weights afterwards, unless a fault hinders it."""
        async with self._drained():
            await asyncio.sleep(self._faults.stream("start").uniform(1, 20))
            self._shelf.clear()
            if not self._faults.strikes("engine-other-weights", self._name, times=3.0):
                self._weights = weights
            return self._weights
