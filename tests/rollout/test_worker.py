"""A rollout worker in this process: leases in, packed outcomes out, deadlines and abandonment."""

import asyncio
import datetime as dt

import pytest

from cluster.config import load_settings
from cluster.failures import DataError, InfrastructureError
from rollout.events.event import EventPrompt
from rollout.forecasters import UniformForecaster
from rollout.lease import Lease
from rollout.record import ForecastKey, ForecastRecord
from rollout.worker import Questions, RolloutWorker

EVENT = EventPrompt(
    id="e", question="Will it?", criteria="", background="", options=("YES", "NO"), selection="single", deadline=None
)


class Scripted:
    """A model that costs a dollar a call and then does as told."""

    def __init__(self, then):
        self._then = then
        self.hangs = self.cancelled = False
        self.released = []

    async def sample(self, request):
        answer = await UniformForecaster().sample(request)
        if self._then == "hang at the second" and len(request.messages) > 2:
            self.hangs = True
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        if isinstance(self._then, Exception):
            raise self._then
        text = "I do not know." if self._then == "hang at the second" else answer.text
        return answer.model_copy(update={"text": text, "price": 1.0})

    async def release(self, session):
        self.released.append(session)


def lease(number=1, last=True, mode="no-tools"):
    key = ForecastKey(model="m", event="e", date=dt.date(2024, 7, 3), mode=mode, rollout=0)
    return Lease(number=number, key=key, attempt=2, carried=None, last=last)


def worker(then, *overrides):
    settings = load_settings([], ["model.kind=uniform", "rollout.prompt=compact", *overrides])
    made = RolloutWorker(settings, None, None, Questions(prompts={"e": EVENT}, beliefs={}))
    made._model = Scripted(then)
    return made


async def outcomes(made, count):
    found = []
    while len(found) < count:
        found += await made.results(60.0)
    return found


def test_leases_and_outcomes_go_in_batches_and_are_packed_here():
    made = worker("answer")

    async def story():
        await made.take([lease(n) for n in range(300)], [])
        return await outcomes(made, 300)

    found = asyncio.run(story())
    assert sorted(o.lease for o in found) == list(range(300))
    record = ForecastRecord.model_validate_json(found[0].packed.record)
    assert (record.attempts, record.usage.price) == (2, 1.0)
    assert found[0].packed.trajectory is not None


def test_a_worker_without_outcomes_says_that_it_lives():
    assert asyncio.run(worker("answer").results(0.01)) == []


def test_an_abandoned_step_ends_its_call_gives_up_its_session_and_says_what_it_cost():
    made = worker("hang at the second")

    async def story():
        await made.take([lease(7, last=False)], [])
        while not made._model.hangs:
            await asyncio.sleep(0.01)
        await made.take([], [7, 8])
        return await outcomes(made, 1)

    (found,) = asyncio.run(story())
    assert (found.lease, found.packed, found.failure.reason) == (7, None, "abandoned")
    assert made._model.cancelled
    assert made._model.released
    assert found.price == 1.0, "its first call was answered"


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (InfrastructureError("engine-time-out", "x"), "infrastructure", "engine-time-out"),
        (DataError("row 3"), "data", "data-error"),
        (ZeroDivisionError("x"), "bug", "zero-division-error"),
        (TimeoutError("a time-out of ours is no deadline"), "bug", "timeout-error"),
    ],
)
def test_what_goes_wrong_is_named_by_one_taxonomy(error, kind, reason):
    made = worker(error)
    found = asyncio.run(made.run(lease(last=False)))
    assert made._model.released, "the next attempt is not bound to the engine of this one"
    assert (found.failure.kind, found.failure.reason) == (kind, reason)
    assert ("Traceback" in found.failure.detail) == (kind == "bug")


def test_a_session_is_kept_for_the_next_step_of_its_chain_and_given_up_after_the_last():
    for last in (False, True):
        made = worker("answer")
        assert asyncio.run(made.run(lease(last=last, mode="memory-on"))).packed is not None
        assert bool(made._model.released) == last
