"""The real RolloutWorker with simulated tools, and the real Crew over answers that come late, twice, in another order or never.

Every model call is shown to the watch before it is sent and after it was answered.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from cluster.config import Settings
from cluster.pool import EngineClient
from retrieval.view import Searcher
from rollout.crew import Crew
from rollout.engine_model import EngineModel
from rollout.lease import Lease, StepOutcome
from rollout.model import Completion, Model, SampleRequest
from rollout.sandbox import Sandbox
from rollout.simulator.faults import Faults
from rollout.simulator.tools import SILENCE, SimulatedCell
from rollout.simulator.watch import Watch
from rollout.simulator.words import WordFormat
from rollout.worker import Questions, RolloutWorker


class WatchedModel:
    """The pool as a model, with a price and a witness."""

    def __init__(self, model: Model, token_price: float, watch: Watch) -> None:
        """`token_price`: US dollars per sampled token."""
        self._model, self._price, self._watch = model, token_price, watch

    async def sample(self, request: SampleRequest) -> Completion:
        """As the model's."""
        self._watch.asks(request)
        try:
            completion = await self._model.sample(request)
        except BaseException:
            self._watch.gave_up(request)
            raise
        priced = completion.model_copy(update={"price": self._price * len(completion.token_ids)})
        self._watch.sampled(request, priced)
        return priced

    async def release(self, session: str) -> None:
        """As the model's."""
        await self._model.release(session)


class SimulatedWorker(RolloutWorker):
    """A worker process."""

    def __init__(
        self,
        settings: Settings,
        engines: EngineClient,
        searcher: Searcher,
        questions: Questions,
        chat: WordFormat,
        token_price: float,
        watch: Watch,
        faults: Faults,
    ) -> None:
        self._watch, self._faults = watch, faults
        super().__init__(settings, engines, searcher, questions)
        self._chat = chat
        model = EngineModel(engines, chat.stop_ids, settings.rollout.deadlines.turn_s)
        self._model = WatchedModel(model, token_price, watch)

    def _cells(self) -> Sandbox:
        return SimulatedCell(self._faults, self._settings.rollout.python.timeout_s)

    async def run(self, lease: Lease) -> StepOutcome:
        """As the real one."""
        self._watch.begins(lease)
        try:
            return await super().run(lease)
        finally:
            self._watch.ends(lease)

    async def results(self, patience_s: float) -> list[StepOutcome]:
        """As the real one, or silence for ever."""
        if self._faults.strikes("worker-silent"):
            await asyncio.sleep(SILENCE)
        return await super().results(patience_s)


class FaultyCrew(Crew):
    """What workers said may be heard late, twice, in another order, or not at all."""

    def __init__(
        self, hire: Callable[[], Any], size: int, timeout_s: float, end: Callable[[Any], None], faults: Faults
    ) -> None:
        """As the real one; `end` ends a worker's process."""
        super().__init__(hire, size, timeout_s, end)
        self._faults = faults
        self._kept: list[StepOutcome] = []

    async def listen(self, number: int) -> list[StepOutcome]:
        """As the real one. What was kept back may be heard after its worker is gone."""
        faults = self._faults
        fresh, kept = await super().listen(number), self._kept
        heard: list[StepOutcome] = []
        self._kept = []
        for outcome in kept + fresh:
            what = str(outcome.lease)
            if faults.strikes("result-lost", what):
                continue
            late = faults.strikes("result-late", what)
            (self._kept if late else heard).append(outcome)
            if faults.strikes("result-twice", what):
                self._kept.append(outcome)
        return heard
