import datetime as dt

import pytest

from cluster.failures import DataError, Failure
from rollout.ledger import Ledger
from rollout.record import ForecastKey, ForecastRecord
from rollout.report import Report
from rollout.trajectory import Trajectory, Turn

DAY = dt.date(2030, 1, 5)


def key(event="e1", date=DAY, mode="memory-free", rollout=0):
    return ForecastKey(model="m", event=event, date=date, mode=mode, rollout=rollout)


def record(for_key, p=0.5):
    report = Report(probabilities={"YES": p, "NO": 1 - p}, verdict="ok", usable_strict=True, usable_lenient=True)
    return ForecastRecord(key=for_key, options=("YES", "NO"), report=report, prompt="x")


def test_a_second_result_for_a_key_changes_nothing(tmp_path):
    with Ledger.create(tmp_path / "l.sqlite", [key()]) as ledger:
        assert ledger.commit(record(key(), 0.25), None)
        assert not ledger.commit(record(key(), 0.75), None)
        (only,) = ledger.records()
        assert only.report.probabilities["YES"] == 0.25


def test_dates_of_one_event_are_different_forecasts(tmp_path):
    keys = [key(), key(date=DAY + dt.timedelta(days=1)), key(mode="memory-on"), key(rollout=1)]
    with Ledger.create(tmp_path / "l.sqlite", keys) as ledger:
        assert all(ledger.commit(record(k), None) for k in keys)
        assert ledger.finished() == set(keys)
        assert [r.key for r in ledger.records()] == keys


def test_a_forecast_that_was_never_scheduled_is_refused(tmp_path):
    with (
        Ledger.create(tmp_path / "l.sqlite", [key()]) as ledger,
        pytest.raises(DataError, match="never scheduled"),
    ):
        ledger.commit(record(key(event="other")), None)


def test_a_schedule_with_a_repetition_is_refused(tmp_path):
    with pytest.raises(DataError, match="twice"):
        Ledger.create(tmp_path / "l.sqlite", [key(), key()])


def test_what_was_committed_is_read_back_by_another_connection(tmp_path):
    turn = Turn(messages=(), prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,), text="<answer>ü\u2028</answer>")
    failed = record(key("e2")).model_copy(update={"failure": Failure(kind="model", reason="no-answer")})
    with Ledger.create(tmp_path / "l.sqlite", [key(), key("e2")]) as ledger:
        ledger.commit(record(key()), Trajectory(turns=(turn,)))
        ledger.commit(failed, None)
        with Ledger.open(tmp_path / "l.sqlite") as reader:
            assert reader.trajectory(key()).turns == (turn,)
            assert reader.trajectory(key("e2")) is None
            assert reader.failures() == {"no-answer": 1}


def test_a_missing_or_foreign_file_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        Ledger.open(tmp_path / "none.sqlite")
    (tmp_path / "text").write_text("not a database, but long enough to have a header of sixteen bytes and more")
    with pytest.raises(DataError, match="text cannot be read"):
        Ledger.open(tmp_path / "text")
