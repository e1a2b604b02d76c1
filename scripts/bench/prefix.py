"""Prefix-cache hits of a real rollout over two engines: sessions that stay with their engine, against calls dealt in turn."""

import itertools
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from cluster.call import EngineCall, EngineOutput
from cluster.pool import EngineClient
from cluster.record import Record
from cluster.session import start_session
from rollout.worker import Questions
from scripts.bench.rollouts import BLOCK, Rolled, plan_of, pool_of, roll, scripted_settings
from scripts.bench.scripted import ScriptedWorker

ENGINES = 2


class Prefix(Record):
    """Shares of the reusable prompt tokens (what a step's earlier turns had shown an engine, in whole blocks) that came from
    the cache."""

    sticky: float
    round_robin: float
    steps: int


class DealingWorker(ScriptedWorker):
    """Its calls go to the engines in turn, whatever their session."""

    def __init__(
        self, settings: Any, engines: EngineClient, questions: Questions, tool_seconds: float, handles: Sequence[Any]
    ) -> None:
        super().__init__(
            settings, _Dealer(engines, handles, settings.engine.request_timeout_s), questions, tool_seconds
        )


class _Dealer(EngineClient):
    def __init__(self, engines: EngineClient, handles: Sequence[Any], timeout_s: float) -> None:
        self.facts = engines.facts
        self._next = itertools.cycle(enumerate(handles))
        self._seconds = timeout_s

    async def generate(
        self,
        session: str,  # noqa: ARG002 - what is left out here is what is measured
        ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        adapter: str | None = None,  # noqa: ARG002
        timeout_s: float | None = None,
    ) -> tuple[EngineOutput, str]:
        """The next engine's answer."""
        number, handle = next(self._next)
        call = EngineCall(
            request_id=uuid.uuid4().hex,
            ids=tuple(ids),
            max_tokens=max_tokens,
            stop_ids=tuple(stop_ids),
            timeout_s=timeout_s or self._seconds,
        )
        return await handle.generate.remote(call), f"engine-{number}"

    async def release(self, session: str) -> None:
        """Nothing was pinned."""


def measure_prefix(folder: Path, steps: int, say: Callable[[str], None]) -> Prefix:
    """Two engines of one core each."""
    overrides = [
        f"rollout.concurrency={steps}",
        f"engine.replicas={ENGINES}",
        "engine.cpus=0.5",
        f"engine.options={{block_size: {BLOCK}}}",
    ]
    settings = scripted_settings(folder, steps, overrides)
    plan, weights = plan_of(settings)
    keys = plan.keys[:steps]
    with (
        start_session(settings.ray),
        pool_of(settings, weights) as pool,
    ):
        engines, handles = pool.client(), list(pool.handles().values())

        def sticky(questions: Any) -> Any:
            return _actor(ScriptedWorker).remote(settings, engines, questions, 0.0)

        def dealing(questions: Any) -> Any:
            return _actor(DealingWorker).remote(settings, engines, questions, 0.0, handles)

        shares: list[float] = []
        for name, hire in (("sticky", sticky), ("round-robin", dealing)):
            ray.get([h.forget_prefixes.remote() for h in handles])
            rolled = roll(plan, keys, hire, folder / f"{name}.sqlite")
            shares.append(_share(rolled))
            say(f"{name}: {shares[-1]:.3f} of the reusable prompt tokens from the cache")
    return Prefix(sticky=shares[0], round_robin=shares[1], steps=len(keys))


def _share(rolled: Rolled) -> float:
    later = [s for s in rolled.samples if s.turn > 0]
    return sum(min(s.cached, s.reusable) for s in later) / sum(s.reusable for s in later)


def _actor(worker: type[ScriptedWorker]) -> Any:
    return ray.remote(worker).options(num_cpus=0.1, max_concurrency=100)
