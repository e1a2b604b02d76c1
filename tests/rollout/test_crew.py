"""Workers that die, do not hear, or die again and again: played by awaitable answers, without Ray."""

import asyncio
import datetime as dt
import os
import signal

import pytest
from coordinated import LIMITS, packed, view
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster.failures import Failure, InfrastructureError
from rollout import crew as crew_module
from rollout import sitting as sitting_module
from rollout.coordinator import Coordinator
from rollout.crew import REPLACEMENT_SECONDS, REPLACEMENTS, Crew, WorkerGone
from rollout.episode import schedule
from rollout.lease import StepOutcome
from rollout.ledger import Ledger
from rollout.limits import Limits
from rollout.sitting import Sitting
from rollout.wants import Halt
from rollout.write_off import WriteOffs

GONE = ActorDiedError()
UNHEARD = ActorUnavailableError("the connection broke", None)


class Method:
    def __init__(self, answer):
        self._answer = answer

    def remote(self, *arguments):
        return asyncio.ensure_future(self._answer(*arguments))


class Played:
    """A worker that answers every lease as soon as `until` says, or fails as told."""

    def __init__(self, take=None, results=None, until=lambda: True):
        self._faults = {"take": take, "results": results}
        self._until = until
        self._outcomes = []
        self.was_given = False
        self.take, self.results, self.ready = Method(self._take), Method(self._results), Method(self._ready)

    async def _take(self, leases, abandoned):
        self._raise("take")
        self.was_given = self.was_given or bool(leases)
        self._outcomes += [StepOutcome(lease=lease.number, packed=packed(lease.key)) for lease in leases]

    async def _results(self, patience_s):
        await asyncio.sleep(0.01)
        self._raise("results")
        if not self._until():
            return []
        found, self._outcomes = self._outcomes, []
        return found

    async def _ready(self):
        return True

    def _raise(self, what):
        if (error := self._faults[what]) is not None:
            raise error


def hiring(workers):
    """Hires these in order."""
    left = iter(workers)
    return lambda: next(left)


def test_a_worker_that_did_not_hear_what_it_was_given_is_given_up():
    ended = []
    worker = Played(take=UNHEARD)

    async def story():
        crew = Crew(hiring([worker]), 1, 10.0, ended.append)
        (number,) = await crew.assemble()
        assert await crew.listen(number) == []
        crew.give(number, [], [7])
        with pytest.raises(WorkerGone, match="the connection broke"):
            await crew.listen(number)

    asyncio.run(story())
    assert ended == [worker]


def test_workers_are_replaced_at_a_bounded_rate_and_not_only_so_often():
    now, hired = 0.0, []

    async def story():
        nonlocal now
        crew = Crew(lambda: hired.append(1) or Played(), 0, 10.0, lambda _: None, clock=lambda: now)
        for _ in range(REPLACEMENTS):
            now += 1.0
            assert await crew.replace() is not None
        assert await crew.replace() is None
        assert crew.replacement_in() == REPLACEMENT_SECONDS - REPLACEMENTS + 1
        now += crew.replacement_in()
        assert await crew.replace() is not None
        assert await crew.replace() is None

    asyncio.run(story())
    assert len(hired) == REPLACEMENTS + 1


def sitting(workers, size, tmp_path, pool=None, grace_s=1.0):
    """A sitting of a few forecasts whose workers are these, in order; its halt and the ledger's failures."""
    days = [dt.date(2030, 1, d) for d in range(1, 9)]
    keys = schedule("m", {"a": days}, ("memory-free",), 1)
    limits: Limits = LIMITS.model_copy(update={"attempts": 50})
    with Ledger.create(tmp_path / "ledger.sqlite", keys) as ledger:
        coordinator = Coordinator(keys, {}, limits, WriteOffs({"a": ("YES", "NO")}, "compact", ""))

        async def story():
            crew = Crew(hiring(workers), size, 10.0, lambda _: None)
            async with asyncio.timeout(60):
                return await Sitting(coordinator, crew, 1, ledger, pool, grace_s, lambda: None).run()

        halt = asyncio.run(story())
        return halt, ledger.counts(), ledger.failures()


def test_a_run_whose_workers_are_all_lost_leaves_its_forecasts_open(tmp_path, monkeypatch):
    monkeypatch.setattr(crew_module, "REPLACEMENTS", 1)
    halt, counts, failures = sitting([Played(take=UNHEARD), *(Played(results=GONE) for _ in range(2))], 2, tmp_path)
    assert (halt.reason, halt.failure.reason) == ("fatal", "no-worker")
    assert counts == (8, 0)
    assert not failures


def test_a_run_goes_on_with_the_workers_that_are_left_until_another_may_be_hired(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(crew_module, "REPLACEMENTS", 1)
    monkeypatch.setattr(crew_module, "REPLACEMENT_SECONDS", 0.2)
    late = Played()
    waiting = Played(until=lambda: late.was_given)
    halt, counts, failures = sitting([Played(take=UNHEARD), waiting, Played(results=GONE), late], 2, tmp_path)
    assert halt == Halt("complete")
    assert counts == (8, 8)
    assert not failures
    assert "rollout workers die too often: 1 are left" in caplog.text


SILENT = InfrastructureError("pool-unreachable", "it has not answered")


def test_a_pool_that_stays_silent_is_taken_for_lost_and_what_is_open_is_left_open(tmp_path, monkeypatch):
    monkeypatch.setattr(sitting_module, "VIEW_SECONDS", 0.01)
    monkeypatch.setattr(sitting_module, "SILENT_SECONDS", 0.2)

    class Silent:
        async def view(self, in_flight):
            raise SILENT

    halt, counts, failures = sitting([Played(until=lambda: False)], 1, tmp_path, Silent())
    assert (halt.reason, halt.failure.reason, halt.failure.detail) == ("fatal", "pool-lost", str(SILENT))
    assert counts == (8, 0)
    assert not failures


def test_no_step_is_started_while_the_pool_is_silent_and_the_run_goes_on_when_it_speaks(tmp_path, monkeypatch):
    monkeypatch.setattr(sitting_module, "VIEW_SECONDS", 0.01)
    answers, asked, started = [view(), *[SILENT] * 20, view()], [], []

    class Noting(Played):
        async def _take(self, leases, abandoned):
            started.append(asked[-1:] == [SILENT])
            await super()._take(leases, abandoned)

    class Speaking:
        async def view(self, in_flight):
            asked.append(answers.pop(0) if len(answers) > 1 else answers[0])
            if asked[-1] is SILENT:
                raise SILENT
            return asked[-1]

    worker = Noting(until=lambda: len(asked) > 5)
    halt, counts, _ = sitting([worker], 1, tmp_path, Speaking())
    assert (halt, counts) == (Halt("complete"), (8, 8))
    assert not answers[1:]
    assert started == [False] * 8


def test_the_pool_is_told_how_many_steps_are_in_flight_and_which_sessions_nobody_can_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sitting_module, "VIEW_SECONDS", 0.01)
    told, released = [], []

    class Pool:
        async def view(self, in_flight):
            told.append(in_flight)
            return view()

        async def release(self, session):
            released.append(session)

    class Failing(Played):
        async def _results(self, patience_s):
            await asyncio.sleep(0.05)
            found, self._outcomes = self._outcomes, []
            failure = Failure(kind="data", reason="wrong-input")
            return [StepOutcome(lease=o.lease, failure=failure) for o in found]

    halt, counts, _ = sitting([Failing()], 1, tmp_path, Pool())
    assert (halt.reason, counts[1]) == ("data-failures", LIMITS.data_failures + 1)
    assert max(told) == 1
    assert released[0] == "a/memory-free/0/2030-01-01"


def test_a_first_signal_lets_a_running_step_finish_and_a_second_one_does_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(sitting_module, "SAY_SECONDS", 0.01)

    class Signalled(Played):
        """Its step never ends; the driver is told to stop as soon as it runs, and again when it has been told once."""

        async def _take(self, leases, abandoned):
            await super()._take(leases, abandoned)
            ended.extend(abandoned)
            if leases:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
                assert not ended, "it may still finish"
                os.kill(os.getpid(), signal.SIGINT)

    ended = []
    halt, counts, failures = sitting([Signalled(until=lambda: False)], 1, tmp_path, grace_s=1000.0)
    assert (halt.reason, counts, failures) == ("stopped", (8, 0), {})
    assert ended == [1]
