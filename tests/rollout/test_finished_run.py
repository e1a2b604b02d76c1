"""A run that is finished already is judged by its ledger, whoever recorded it and when."""

import pytest

from cluster.config import load_settings
from cluster.failures import DataError, Failure
from eval.evaluate import roll_out
from retrieval.build import build_from_settings
from rollout.events.world import make_world, write_settings
from rollout.execute import execute
from rollout.packed import pack
from rollout.plan import make_plan
from rollout.record import ForecastRecord
from rollout.run import RunDirectory


@pytest.mark.parametrize(("kind", "counted"), [("infrastructure", "lost"), ("bug", "bugs")])
def test_losses_of_an_earlier_sitting_still_count(tmp_path, kind, counted):
    made = make_world(tmp_path / "world", 4, 6, 60, 4.0)
    overrides = ["index.encoder=hashing", "model.kind=uniform", f"run.directory={tmp_path / 'run'}"]
    settings = load_settings([write_settings(tmp_path / "world", made)], overrides)
    build_from_settings(settings)
    plan = make_plan(settings)
    run = RunDirectory(tmp_path / "run")
    run.create(plan.settings, plan.manifest, plan.events, plan.keys, plan.floor(), plan.unused_rows)
    options = {e.id: e.options for e in plan.events}
    with run.ledger() as ledger:
        for key in plan.keys:
            failure = Failure(kind=kind, reason="gone")
            record = ForecastRecord(key=key, options=options[key.event], report=None, failure=failure, prompt="x")
            ledger.commit([pack(record, None)])
    summary = execute(plan, resume=True, report=lambda _: None)
    assert (summary.recorded, summary.recorded_now) == (len(plan.keys), 0)
    assert getattr(summary, counted) == len(plan.keys)
    with pytest.raises(DataError, match="would mislead"):
        roll_out(settings, lambda _: None)
