"""The ledger: the first record of a key stays, what is acknowledged is on disk, and what is taken back is kept."""

import datetime as dt
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.failures import DataError, Failure
from rollout.changes import Committed, Superseded
from rollout.ledger import Ledger
from rollout.notebook import NotebookState
from rollout.packed import pack
from rollout.record import ForecastKey, ForecastRecord, Usage
from rollout.report import Report
from rollout.resumption import Recorded, earlier_tally
from rollout.trajectory import Trajectory, Turn

REPOSITORY = Path(__file__).parents[2]
DAY = dt.date(2030, 1, 5)
NOON = dt.datetime(2030, 6, 1, 12, tzinfo=dt.UTC)


def key(event="e1", date=DAY, mode="memory-free", rollout=0):
    return ForecastKey(model="m", event=event, date=date, mode=mode, rollout=rollout)


def record(for_key, p=0.5, **fields):
    report = Report(probabilities={"YES": p, "NO": 1 - p}, verdict="ok", usable_strict=True, usable_lenient=True)
    return ForecastRecord(key=for_key, options=("YES", "NO"), report=report, prompt="x", **fields)


def packed(for_key, p=0.5, **fields):
    return pack(record(for_key, p, **fields), None)


def failed(for_key, kind, reason="gone"):
    return packed(for_key, failure=Failure(kind=kind, reason=reason, detail="d" * 50))


def days(event, mode, count=4, rollout=0):
    return [key(event, DAY + dt.timedelta(days=i), mode, rollout) for i in range(count)]


def test_a_second_result_for_a_key_changes_nothing(tmp_path):
    with Ledger.create(tmp_path / "l.sqlite", [key()]) as ledger:
        assert ledger.commit([packed(key(), 0.25)]) == [True]
        assert ledger.commit([packed(key(), 0.75)]) == [False]
        (only,) = ledger.records()
        assert only.report.probabilities["YES"] == 0.25


def test_the_first_of_two_results_in_one_batch_stays(tmp_path):
    keys = [key(), key("e2")]
    with Ledger.create(tmp_path / "l.sqlite", keys) as ledger:
        assert ledger.commit([packed(keys[0], 0.25), packed(keys[1]), packed(keys[0], 0.75)]) == [True, True, False]
        assert [r.report.probabilities["YES"] for r in ledger.records()] == [0.25, 0.5]
        assert ledger.last_change() == 2


def test_dates_of_one_event_are_different_forecasts(tmp_path):
    keys = [key(), key(date=DAY + dt.timedelta(days=1)), key(mode="memory-on"), key(rollout=1)]
    with Ledger.create(tmp_path / "l.sqlite", keys) as ledger:
        assert all(ledger.commit([packed(k) for k in keys]))
        assert ledger.finished() == set(keys)
        assert ledger.counts() == (4, 4)
        assert [r.key for r in ledger.records()] == keys


def test_a_batch_with_a_forecast_that_was_never_scheduled_is_refused_whole(tmp_path):
    with Ledger.create(tmp_path / "l.sqlite", [key()]) as ledger:
        with pytest.raises(DataError, match="never scheduled"):
            ledger.commit([packed(key()), packed(key(event="other"))])
        assert ledger.finished() == set()
        assert ledger.commit([packed(key())]) == [True]


def test_a_schedule_with_a_repetition_is_refused(tmp_path):
    with pytest.raises(DataError, match="twice"):
        Ledger.create(tmp_path / "l.sqlite", [key(), key()])


def test_what_was_committed_is_read_back_by_another_connection(tmp_path):
    turn = Turn(messages=(), prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,), text="<answer>ü\u2028</answer>")
    with Ledger.create(tmp_path / "l.sqlite", [key(), key("e2")]) as ledger:
        ledger.commit([pack(record(key()), Trajectory(turns=(turn,))), failed(key("e2"), "model", "no-answer")])
        with Ledger.open(tmp_path / "l.sqlite") as reader:
            assert reader.trajectory(key()).turns == (turn,)
            assert reader.trajectory(key("e2")) is None
            assert reader.failures() == {"no-answer": 1}


def test_going_on_asks_what_is_held_and_what_it_left(tmp_path):
    notebook = NotebookState(notebook=None, status="missing", why="ü")
    usage = Usage(output_tokens=7, price=0.25)
    keys = [key(mode="memory-on"), key("e2"), key("e3")]
    with Ledger.create(tmp_path / "l.sqlite", keys) as ledger:
        ledger.commit([failed(keys[1], "infrastructure"), packed(keys[0], notebook=notebook, usage=usage)])
        assert [ledger.holds(k) for k in (*keys, key("e4"))] == [True, True, False, False]
        assert (ledger.notebook(keys[0]), ledger.notebook(keys[1])) == (notebook, None)
        for missing in (keys[2], key("e4")):
            with pytest.raises(KeyError):
                ledger.notebook(missing)
        tally = earlier_tally(ledger)
        assert (tally.failures, tally.kinds, tally.price) == ({"gone": 1}, {"infrastructure": 1}, 0.25)
        assert dict(Recorded(ledger)) == {keys[0]: notebook, keys[1]: None}


def test_a_retry_opens_the_failures_of_the_named_kinds_and_no_other(tmp_path):
    keys = [key(f"e{i}") for i in range(4)]
    with Ledger.create(tmp_path / "l.sqlite", keys, clock=lambda: NOON) as ledger:
        ledger.commit([failed(keys[0], "infrastructure"), failed(keys[1], "model", "no-answer"), packed(keys[2])])
        retried = ledger.retry({"infrastructure"}, "asked for")
        assert (retried.failures, retried.later_steps, retried.total) == ({"gone": 1}, 0, 1)
        assert ledger.finished() == {keys[1], keys[2]}
        assert ledger.retry({"infrastructure"}, "again").total == 0
        assert ledger.commit([packed(keys[0], 0.9)]) == [True]
        assert [r.key for r in ledger.records()] == keys[:3]
        assert ledger.failures() == {"no-answer": 1}


def test_a_retried_step_opens_the_later_steps_of_its_chain_and_no_other_chain(tmp_path):
    chain, other, free = days("e1", "memory-on"), days("e1", "memory-on", rollout=1), days("e1", "memory-free")
    with Ledger.create(tmp_path / "l.sqlite", [*chain, *other, *free]) as ledger:
        ledger.commit([packed(k) for k in (chain[0], *chain[2:], *other)])
        ledger.commit([failed(chain[1], "infrastructure"), failed(free[1], "infrastructure")])
        ledger.commit([packed(free[2])])
        retried = ledger.retry({"infrastructure"}, "asked for")
        assert (retried.failures, retried.later_steps) == ({"gone": 2}, 2)
        assert ledger.finished() == {chain[0], *other, free[2]}


def test_what_a_retry_takes_back_is_kept_with_time_and_reason(tmp_path):
    with Ledger.create(tmp_path / "l.sqlite", [key()], clock=lambda: NOON) as ledger:
        ledger.commit([failed(key(), "model")])
        ledger.retry({"model"}, "asked for")
        ledger.commit([packed(key())])
        first, second, third = ledger.changes(0, 10)
        assert isinstance(first, Committed)
        assert "d" * 50 in first.record
        assert second == Superseded(change=2, forecast=1, at=NOON, why="asked for")
        assert isinstance(third, Committed)
        assert (third.change, third.at, third.key) == (3, NOON, key())


def test_what_was_taken_back_was_paid_for(tmp_path):
    with Ledger.create(tmp_path / "l.sqlite", [key()]) as ledger:
        ledger.commit([packed(key(), failure=Failure(kind="bug", reason="x"), usage=Usage(output_tokens=3, price=1.5))])
        ledger.retry({"bug"}, "asked for")
        assert ledger.spent() == (3, 1.5)


_KINDS = st.sampled_from([None, "infrastructure", "model", "data", "bug"])
_COMMIT = st.lists(st.tuples(st.integers(0, 11), _KINDS), max_size=6)
_RETRY = st.sets(_KINDS.filter(bool), min_size=1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(_COMMIT, _RETRY), max_size=8), st.integers(1, 5))
def test_a_ledger_that_replays_the_changes_of_another_equals_it(tmp_path_factory, happenings, limit):
    folder = tmp_path_factory.mktemp("replay")
    keys = [k for e in ("a", "b") for m in ("memory-free", "memory-on") for k in days(e, m, 3)]
    held: dict = {}
    with Ledger.create(folder / "one.sqlite", keys) as one, Ledger.create(folder / "two.sqlite", keys) as two:
        for happening in happenings:
            if isinstance(happening, list):
                expected = []
                for i, kind in happening:
                    expected.append(keys[i] not in held)
                    held.setdefault(keys[i], kind)
                batch = [failed(keys[i], kind) if kind else packed(keys[i]) for i, kind in happening]
                assert one.commit(batch) == expected
            else:
                one.retry(happening, "asked for")
                hit = {k for k, f in held.items() if f in happening}
                chains = {(k.event, k.date) for k in hit if k.mode == "memory-on"}
                hit |= {
                    k for k in held if k.mode == "memory-on" and any(k.event == e and k.date > d for e, d in chains)
                }
                held = {k: f for k, f in held.items() if k not in hit}
            assert one.finished() == set(held)
            while changes := one.changes(two.last_change(), limit):
                two.replay(changes)
        assert {r.key: r.failure and r.failure.kind for r in one.records()} == held
        assert [one.holds(k) for k in keys] == [two.holds(k) for k in keys] == [k in held for k in keys]
        assert one.kinds() == two.kinds() == Counter(filter(None, held.values()))
        assert list(one.records()) == list(two.records())
        assert one.changes(0, 10_000) == two.changes(0, 10_000)


def test_a_second_writer_is_refused_while_readers_are_not(tmp_path):
    file = tmp_path / "l.sqlite"
    code = (
        "import sys; from pathlib import Path; from rollout.ledger import Ledger; ledger = Ledger.open(Path(sys.argv[1])); "
        "print(len(ledger.finished()), flush=True); ledger.commit([])"
    )
    with Ledger.create(file, [key()]) as ledger:
        ledger.commit([packed(key())])
        other = subprocess.run([sys.executable, "-c", code, file], cwd=REPOSITORY, capture_output=True, text=True)
        assert other.stdout == "1\n"
        assert "has another writer" in other.stderr
    with Ledger.open(file) as ledger:
        assert ledger.commit([packed(key())]) == [False]


def test_a_missing_or_foreign_file_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        Ledger.open(tmp_path / "none.sqlite")
    (tmp_path / "text").write_text("not a database, but long enough to have a header of sixteen bytes and more")
    with pytest.raises(DataError, match="text cannot be read"):
        Ledger.open(tmp_path / "text")


def test_a_ledger_of_another_version_is_refused_with_what_to_do(tmp_path):
    file = tmp_path / "l.sqlite"
    Ledger.create(file, [key()]).close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE version SET number = 1")
    with pytest.raises(DataError, match="has version 1 and this code reads 2; read it with the code that wrote it"):
        Ledger.open(file)


def test_changes_that_are_read_while_others_are_written_leave_none_out(tmp_path):
    keys = days("e1", "memory-free", 3)
    with Ledger.create(tmp_path / "l.sqlite", keys) as writer, Ledger.open(tmp_path / "l.sqlite") as reader:
        writer.commit([failed(keys[0], "infrastructure")])

        def between(statement):
            """A retry and a commit come between the two questions."""
            if "FROM forecasts JOIN contents" in statement and writer.last_change() == 1:
                writer.retry({"infrastructure"}, "asked for")
                writer.commit([packed(keys[1])])

        reader._connection.set_trace_callback(between)
        assert [c.change for c in reader.changes(0, 100)] == [1]
        assert writer.last_change() == 3
        assert [c.change for c in reader.changes(1, 100)] == [2, 3]
