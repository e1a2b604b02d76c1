"""Whole runs of an instant model on a real Ray session: workers that die, runs that are refused, failures that are retried.

One session serves the whole module.
"""

import datetime as dt
from collections import Counter

import pytest
import ray

import rollout.execute
from cluster.config import RaySettings, load_settings
from cluster.failures import Failure, SettingsError
from cluster.session import start_session
from rollout.crew import Crew
from rollout.events.event import Event
from rollout.execute import execute
from rollout.plan import make_plan
from rollout.run import RunDirectory
from rollout.write_off import WriteOffs

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def session():
    with start_session(RaySettings(cpus=2)):
        yield


def plan(folder, events=6, *overrides):
    rows = [
        Event(
            id=f"e{n}",
            source="test",
            question=f"Will it happen, {n}?",
            options=("YES", "NO"),
            opened=dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
            closed=dt.datetime(2024, 3, 1, tzinfo=dt.UTC),
            outcome=("YES",),
        )
        for n in range(events)
    ]
    file = folder / "events.jsonl"
    file.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    settings = [
        f"events.path={file}",
        f"run.directory={folder / 'run'}",
        f"index.directory={folder / 'none'}",
        "events.eval={start: 2023-01-01, end: 2025-01-01}",
        "model.kind=uniform",
        "rollout.workers=2",
        "rollout.concurrency=4",
        *overrides,
    ]
    return make_plan(load_settings([], settings))


def once_each(plan):
    with RunDirectory(plan.settings.run.directory).ledger() as ledger:
        records = list(ledger.records())
    assert Counter(r.key for r in records) == Counter(plan.keys)
    return records


def test_a_worker_that_dies_costs_its_attempts_and_nothing_else(tmp_path, monkeypatch):
    crews = []

    class Watched(Crew):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            crews.append(self)

    monkeypatch.setattr(rollout.execute, "Crew", Watched)
    made = plan(tmp_path, 40)
    killed = []

    def kill_one(progress):
        if progress.running and not killed:
            number, handle = next(iter(crews[0].handles().items()))
            ray.kill(handle)
            killed.append(number)

    summary = execute(made, False, kill_one)
    assert killed
    assert (summary.ended, summary.recorded, summary.lost) == ("complete", len(made.keys), 0)
    assert summary.retried > 0
    records = once_each(made)
    assert {r.attempts for r in records} == {1, 2}
    for record in records:
        if record.key.mode == "memory-on":
            earlier = [k.date for k in made.keys if k.mode == "memory-on" and k.event == record.key.event]
            first = min(earlier) == record.key.date
            assert (record.carried is None) == first, "a chain carries on from its second date"


def test_a_run_that_does_not_fit_is_refused_and_lays_nothing(tmp_path):
    with pytest.raises(SettingsError, match="does not fit"):
        execute(plan(tmp_path, 2, "ray.worker_cpus=50"), False, lambda _: None)
    assert not RunDirectory(tmp_path / "run").exists
    made = plan(tmp_path, 2)
    assert execute(made, False, lambda _: None).ended == "complete", "it needs no --resume"
    once_each(made)


def test_recorded_failures_are_run_again_only_when_asked(tmp_path):
    made = plan(tmp_path, 2)
    chain = [k for k in made.keys if k.event == "e0" and k.mode == "memory-on"]
    single = next(k for k in made.keys if k.mode == "no-tools")
    assert execute(made, False, lambda _: None).ended == "complete"
    # As if the second date of one chain had been a straggler and one forecast a bug.
    folder = tmp_path / "again"
    other = plan(tmp_path, 2, f"run.directory={folder}")
    run = RunDirectory(folder)
    run.create(other.settings, other.manifest, other.events, other.keys, other.floor())
    write_off = WriteOffs({e.id: e.options for e in other.events}, "full", "")
    late = Failure(kind="infrastructure", reason="straggler")
    with run.ledger() as ledger:
        ledger.commit([write_off(chain[0], late, None, 1)])
        ledger.commit([write_off(single, Failure(kind="bug", reason="key-error"), None, 1)])
    resumed = execute(other, True, lambda _: None)
    assert (resumed.failures, resumed.reopened) == ({"straggler": 1, "key-error": 1}, 0)
    assert resumed.recorded_now == len(other.keys) - 2
    with run.ledger() as ledger:
        second = next(r for r in ledger.records() if r.key == chain[1])
    assert second.carried.missed == (chain[0].date,), "it says what it lacked"
    retried = execute(other, True, lambda _: None, retry=("infrastructure",))
    assert retried.failures == {"key-error": 1}
    assert retried.reopened == retried.recorded_now == len(chain), "later steps came from the older notebook"
    assert all(r.carried is None or not r.carried.missed for r in once_each(other))
