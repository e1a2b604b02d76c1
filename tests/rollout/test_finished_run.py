"""A run that is finished already is judged by its ledger, whoever recorded it and when."""

import pytest
import ray

from cluster.config import load_settings
from cluster.failures import DataError, Failure, Interrupted
from eval import evaluate
from eval.evaluate import roll_out
from retrieval.build import build_from_settings
from rollout.events.world import make_world, write_settings
from rollout.execute import execute
from rollout.packed import pack
from rollout.plan import make_plan
from rollout.record import ForecastRecord
from rollout.run import RunDirectory


def begun(tmp_path, failures, *overrides):
    """The plan of a run of which so many forecasts, or all, ended in that failure in an earlier sitting."""
    made = make_world(tmp_path / "world", 4, 6, 60, 4.0)
    common = ["index.encoder=hashing", "model.kind=uniform", f"run.directory={tmp_path / 'run'}"]
    settings = load_settings([write_settings(tmp_path / "world", made)], [*common, *overrides])
    build_from_settings(settings)
    plan = make_plan(settings)
    run = RunDirectory(tmp_path / "run")
    run.create(plan.settings, plan.manifest, plan.events, plan.keys, plan.floor(), plan.unused_rows)
    options = {e.id: e.options for e in plan.events}
    with run.ledger() as ledger:
        for key, failure in zip(plan.keys, failures(plan.keys), strict=False):
            record = ForecastRecord(key=key, options=options[key.event], report=None, failure=failure, prompt="x")
            ledger.commit([pack(record, None)])
    return plan


def test_a_run_whose_budget_earlier_sittings_spent_is_not_started_again(tmp_path):
    plan = begun(tmp_path, lambda _: [Failure(kind="data", reason="data-error")] * 3, "rollout.data_failures=2")
    summary = execute(plan, resume=True, report=lambda _: None)
    assert (summary.ended, summary.recorded, summary.recorded_now) == ("data-failures", 3, 0)
    with pytest.raises(DataError, match=r"raise rollout\.data_failures, and run the same command again"):
        roll_out(plan.settings, lambda _: None)
    assert not ray.is_initialized()


def test_a_rollout_that_a_signal_ended_ends_what_was_to_follow_with_that_signal(tmp_path, monkeypatch):
    plan = begun(tmp_path, lambda _: [])
    over = begun(tmp_path / "over", lambda _: [Failure(kind="bug", reason="x")], "rollout.bugs=0")
    summary = execute(over, resume=True, report=lambda _: None)
    stopped = summary.model_copy(update={"ended": "stopped", "signal": 2})
    monkeypatch.setattr(evaluate, "execute", lambda *_, **__: stopped)
    with pytest.raises(Interrupted, match="run the same command again") as raised:
        roll_out(plan.settings, lambda _: None)
    assert raised.value.signal == 2


@pytest.mark.parametrize(("kind", "counted"), [("infrastructure", "lost"), ("bug", "bugs")])
def test_losses_of_an_earlier_sitting_still_count(tmp_path, kind, counted):
    plan = begun(tmp_path, lambda keys: [Failure(kind=kind, reason="gone")] * len(keys))
    summary = execute(plan, resume=True, report=lambda _: None)
    assert (summary.recorded, summary.recorded_now) == (len(plan.keys), 0)
    assert getattr(summary, counted) == len(plan.keys)
    with pytest.raises(DataError, match=r"would mislead.*/settings\.yaml --resume --retry"):
        roll_out(plan.settings, lambda _: None)
    # What that message advises is this run.
    assert make_plan(load_settings([tmp_path / "run" / "settings.yaml"])).manifest == plan.manifest
