"""A worker on a node whose sandbox is not the manifest's takes no step."""

import asyncio
import datetime as dt

import pytest

from cluster.config import Settings, load_settings
from cluster.failures import SettingsError
from retrieval.article import Article, Hit
from rollout.events.event import EventPrompt
from rollout.lease import Lease
from rollout.record import ForecastKey, Mode
from rollout.sandbox import Sandbox
from rollout.worker import Questions, RolloutWorker, sandbox_fault

SETTINGS = load_settings([], ["model.kind=reader", "rollout.python.isolation=process"])
STRONGER = "isolation bubblewrap, clock libfaketime; weak points: none"


class NoSearcher:
    """A search service that must not be reached."""

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        raise AssertionError("a worker with another sandbox searched")

    async def fetch(self, article_id: str) -> Article | None:
        raise AssertionError("a worker with another sandbox read")


EVENT = EventPrompt(
    id="e", question="Will it?", criteria="", background="", options=("YES", "NO"), selection="single", deadline=None
)
QUESTIONS = Questions(prompts={"e": EVENT}, beliefs={})


def worker(sandbox: str, settings: Settings = SETTINGS) -> RolloutWorker:
    return RolloutWorker(settings, None, NoSearcher(), QUESTIONS, sandbox)


def lease(mode: Mode) -> Lease:
    return Lease(
        number=1,
        carried=None,
        last=True,
        key=ForecastKey(model="reader", event="e", date=dt.date(2024, 7, 3), mode=mode, rollout=0),
        attempt=1,
    )


def test_a_worker_with_the_manifests_sandbox_is_ready() -> None:
    described = Sandbox(SETTINGS.rollout.python).describe()
    assert asyncio.run(worker(described).ready())
    assert asyncio.run(worker("").ready()), "an empty description is not checked"


def test_a_lease_that_was_abandoned_before_it_arrived_does_not_begin() -> None:
    """Ray does not keep the order of an actor's calls."""

    async def play() -> list[int]:
        one = worker("")
        await one.take([], [1])
        await one.take([lease("no-tools"), lease("no-tools").model_copy(update={"number": 2})], [])
        return [outcome.lease for outcome in await one.results(5.0)]

    assert asyncio.run(play()) == [2]


def test_a_worker_with_another_sandbox_is_never_ready_and_names_both() -> None:
    with pytest.raises(SettingsError) as refused:
        asyncio.run(worker(STRONGER).ready())
    assert STRONGER in str(refused.value)
    assert Sandbox(SETTINGS.rollout.python).describe() in str(refused.value)


def test_a_step_that_reaches_it_all_the_same_is_given_back_unscored() -> None:
    outcome = asyncio.run(worker(STRONGER).run(lease("memory-free")))
    assert outcome.packed is None
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.reason) == ("infrastructure", "other-sandbox")


def test_a_step_without_tools_needs_no_sandbox() -> None:
    outcome = asyncio.run(worker(STRONGER).run(lease("no-tools")))
    assert outcome.failure is None
    assert outcome.packed is not None


def test_the_fault_names_the_node() -> None:
    assert "node n7" in sandbox_fault("strong", "weak", "n7")
    assert sandbox_fault("same", "same", "n7") == ""
