"""Whole runs in one process under a virtual clock: real machines, simulated engines, tools, nodes and disks.

A failing seed is printed; `python -m scripts.simulate --seed N --trace` replays it.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster.engine import EngineActor
from cluster.failures import InfrastructureError
from cluster.fleet import Fleet
from cluster.health import Health
from cluster.holdings import Holdings
from cluster.routing import Router
from rollout.coordinator import Coordinator
from rollout.ledger import Ledger
from rollout.simulator.faults import FAULTS
from rollout.simulator.run import simulate
from rollout.step import _Step
from rollout.tools import ToolRunner
from rollout.trajectory import ToolResult

REPOSITORY = Path(__file__).parents[2]
SEEDS = 500
ENOUGH = 150
"""Seeds within which a broken machine must be caught."""


def test_no_fault_breaks_a_promise():
    """Also: every kind of fault was injected, and runs ended only in ways in which they may."""
    faults, ended = Counter(), Counter()
    for seed in range(SEEDS):
        result = simulate(seed)
        assert not result.broken, f"python -m scripts.simulate --seed {seed} --trace\n{result}"
        faults.update(result.faults)
        ended[result.ended] += 1
    assert set(FAULTS) == set(faults)
    assert {"complete", "max-cost", "bugs"} <= set(ended) <= {"complete", "max-cost", "bugs", "data-failures"}


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_replays_to_the_last_event_whatever_the_hash_seed(seed):
    code = f"from rollout.simulator.run import simulate; print(simulate({seed}).model_dump_json())"
    found = []
    for hash_seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
        )
        found.append(json.loads(ran.stdout))
    assert found[0] == found[1] == simulate(seed).model_dump(mode="json")


def _caught(seeds=ENOUGH):
    """The first promise that a seed finds broken."""
    for seed in range(seeds):
        if broken := simulate(seed).broken:
            return broken
    return ""


def test_a_coordinator_that_takes_a_result_twice_is_caught(monkeypatch):
    honest = Coordinator.outcome

    def outcome(self, outcome, now):
        if outcome.lease not in self._running and outcome.packed is not None:
            self._uncommitted.add(next(iter(self._chains), 0), outcome.packed)
        return honest(self, outcome, now)

    monkeypatch.setattr(Coordinator, "outcome", outcome)
    assert _caught()


def test_a_coordinator_that_forgets_the_leases_of_a_dead_worker_is_caught(monkeypatch):
    def lost(self, worker, now, detail=""):
        self._seats.leave(worker)

    monkeypatch.setattr(Coordinator, "lost", lost)
    assert _caught()


def test_a_chain_that_goes_on_before_the_commit_is_caught(monkeypatch):
    honest = Coordinator._arrive

    def arrive(self, number, packed):
        chain = self._chains[number]
        honest(self, number, packed)
        if chain.left > 1 and chain.key == packed.key:
            chain.recorded()
            self._queue(number, chain)

    monkeypatch.setattr(Coordinator, "_arrive", arrive)
    assert _caught()


def test_a_chain_that_forgets_its_notebook_after_a_failure_is_caught(monkeypatch):
    honest = Coordinator._advance

    def advance(self, number, packed):
        chain = self._chains[number]
        honest(self, number, packed)
        if packed.failure is not None:
            chain.carried = None

    monkeypatch.setattr(Coordinator, "_advance", advance)
    assert "notebook" in _caught()


def test_a_resumption_that_does_not_read_the_ledger_is_caught(monkeypatch):
    monkeypatch.setattr(Ledger, "holds", lambda self, key: False)
    assert _caught()


def test_a_ledger_that_acknowledges_before_it_stores_is_caught(monkeypatch):
    honest = Ledger.commit
    late = []

    def commit(self, forecasts):
        if late:
            honest(self, late.pop())
        late.append(list(forecasts))
        return [True] * len(forecasts)

    monkeypatch.setattr(Ledger, "commit", commit)
    assert _caught()


def test_attempts_without_a_bound_are_caught(monkeypatch):
    honest = Coordinator._fail

    def fail(self, number, failure, now):
        self._chains[self._running[number].chain].attempts -= 1
        honest(self, number, failure, now)

    monkeypatch.setattr(Coordinator, "_fail", fail)
    assert "attempt" in _caught()


def test_a_cost_without_a_bound_is_caught(monkeypatch):
    monkeypatch.setattr(Coordinator, "_check_budgets", lambda self: None)
    assert "dollars" in _caught()


def test_a_fleet_that_serves_unconfirmed_weights_is_caught(monkeypatch):
    honest = Fleet.started

    def started(self, engine, incarnation, now):
        wants = honest(self, engine, incarnation, now)
        found = self._current(engine, incarnation)
        if found is not None and found.health.state == "STALE":
            self._tickets.router.admit(engine)
            return wants + self._settle(now)
        return wants

    monkeypatch.setattr(Fleet, "started", started)
    assert "STALE" in _caught()


def test_a_fleet_that_trusts_any_weights_is_caught(monkeypatch):
    monkeypatch.setattr(Holdings, "difference", lambda self, want, weights, adapters: None)
    assert "which holds other-weights" in _caught()


def test_a_router_that_keeps_the_sessions_of_a_closed_engine_is_caught(monkeypatch):
    def close(self, engine):
        self._open.discard(engine)
        self._held.discard(engine)

    monkeypatch.setattr(Router, "close", close)
    assert "is on engine" in _caught()


def test_a_fleet_that_forgets_to_give_tickets_back_is_caught(monkeypatch):
    monkeypatch.setattr(Fleet, "cancelled", lambda self, ticket, now: ())
    assert "is held after" in _caught()


def test_restarts_without_a_bound_are_caught(monkeypatch):
    monkeypatch.setattr(Health, "may_start", property(lambda self: True))
    assert "restarted" in _caught()


def test_an_engine_that_ignores_aborts_is_caught(monkeypatch):
    async def abort(self, request_id, why=""):
        pass

    monkeypatch.setattr(EngineActor, "abort", abort)
    assert "given up" in _caught()


def test_a_tool_that_shows_the_error_of_its_service_is_caught(monkeypatch):
    honest = ToolRunner.run

    async def run(self, want):
        try:
            return await honest(self, want)
        except InfrastructureError as error:
            return ToolResult(call_id=want.call_id, name="search", text=str(error))

    monkeypatch.setattr(ToolRunner, "run", run)
    assert "error of the infrastructure" in _caught()


def test_calls_without_a_budget_are_caught(monkeypatch):
    honest = _Step._use

    def use(self, calls, reasons, offered):
        self._calls += len(calls)
        return (yield from honest(self, calls, reasons, offered))

    monkeypatch.setattr(_Step, "_use", use)
    assert "calls of" in _caught()


def test_stragglers_that_nobody_abandons_are_caught(monkeypatch):
    monkeypatch.setattr(Coordinator, "_oldest", lambda self: None)
    assert "a step has run for" in _caught()


def test_a_view_that_shows_the_future_is_caught(monkeypatch):
    from retrieval.view import DatedView

    monkeypatch.setattr(DatedView, "_require_visible", lambda self, article_id, day: None)
    assert "was shown an article of" in _caught()
