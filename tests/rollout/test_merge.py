"""Runs of one plan are joined without losing, repeating or inventing a record; whatever differs is refused by name."""

import shutil
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mirrored_run import EVENTS, EVERY_KEY, FLOOR, lay, packed

from cluster.config import Settings, load_settings
from cluster.failures import DataError, SettingsError
from eval.runs import load_run
from rollout.changes import Superseded
from rollout.events.world import make_world, write_settings
from rollout.execute import execute
from rollout.merge import merge_runs
from rollout.plan import make_plan
from rollout.run import RunDirectory
from rollout.share import joined_share, share_of


def copy(run, path):
    shutil.copytree(run.path, path)
    return RunDirectory(path)


def commit(run, keys, **kind):
    with run.ledger() as ledger:
        ledger.commit([packed(k, **kind) for k in keys])


def retry(run, kinds=("infrastructure",)):
    with run.ledger() as ledger:
        ledger.retry(set(kinds), "asked for")


def current(run):
    with run.ledger() as ledger:
        return {r.key: r for r in ledger.records()}


def retractions(run):
    with run.ledger() as ledger:
        return sum(isinstance(c, Superseded) for c in ledger.changes(0, 10**6))


@pytest.fixture
def laid(tmp_path):
    return lay(RunDirectory(tmp_path / "one"))


def test_copies_of_a_run_that_went_on_apart_are_joined(tmp_path, laid):
    commit(laid, EVERY_KEY[:10])
    other = copy(laid, tmp_path / "two")
    commit(laid, EVERY_KEY[10:30])
    commit(other, EVERY_KEY[30:70])
    merged = merge_runs(tmp_path / "out", [laid.path, other.path])
    assert (merged.runs, merged.scheduled, merged.recorded, merged.repeated) == (2, len(EVERY_KEY), 70, 10)
    out = RunDirectory(tmp_path / "out")
    assert current(out) == current(laid) | current(other)
    assert out.manifest() == laid.manifest()
    out.check_resumable(laid.manifest())
    assert out.settings().run.directory == tmp_path / "out"
    assert (out.events(), out.floor()) == ({e.id: e for e in EVENTS}, FLOOR)
    with out.ledger() as ledger, laid.ledger() as before:
        assert list(ledger.scheduled()) == list(before.scheduled())
        assert ledger.trajectory(EVERY_KEY[12]) == before.trajectory(EVERY_KEY[12])
    assert len(load_run(out.path).records) == 70


def test_a_key_with_two_records_is_refused_and_nothing_is_written(tmp_path, laid):
    other = copy(laid, tmp_path / "two")
    commit(laid, EVERY_KEY[:10], p=0.5)
    commit(other, EVERY_KEY[8:20], p=0.6)
    with pytest.raises(DataError, match="2 forecasts have different records") as refused:
        merge_runs(tmp_path / "out", [laid.path, other.path])
    assert EVERY_KEY[8].model_dump_json() in str(refused.value)
    assert not RunDirectory(tmp_path / "out").exists


def test_equal_records_of_two_jobs_are_one(tmp_path, laid):
    other = copy(laid, tmp_path / "two")
    commit(laid, EVERY_KEY[:10])
    commit(other, EVERY_KEY[:10])
    assert merge_runs(tmp_path / "out", [laid.path, other.path]).recorded == 10


def test_runs_of_other_things_are_refused_with_every_difference(tmp_path, laid):
    changed = load_settings([], ["sampling.temperature=0.5", "rollout.count=2"])
    other = lay(RunDirectory(tmp_path / "two"), changed)
    with pytest.raises(SettingsError, match=r"two cannot be merged with .*one") as refused:
        merge_runs(tmp_path / "out", [laid.path, other.path])
    assert "settings.sampling.temperature: 1.0 → 0.5" in str(refused.value)
    assert "settings.rollout.count: 1 → 2" in str(refused.value)


def test_a_run_is_not_merged_with_itself_nor_into_a_run(tmp_path, laid):
    other = copy(laid, tmp_path / "two")
    with pytest.raises(SettingsError, match="at least two different runs"):
        merge_runs(tmp_path / "out", [laid.path, tmp_path / "two" / ".." / "one"])
    with pytest.raises(SettingsError, match="holds a run already"):
        merge_runs(laid.path, [laid.path, other.path])


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_what_one_job_took_back_is_taken_back_in_any_order(tmp_path, laid, order):
    first, second, third = EVERY_KEY[0], EVERY_KEY[4], EVERY_KEY[20]
    commit(laid, [first, second], kind="infrastructure")
    commit(laid, [third])
    stale = copy(laid, tmp_path / "two")
    retry(laid)
    commit(laid, [first])
    failed_again = copy(laid, tmp_path / "three")
    commit(failed_again, [second], kind="infrastructure")
    runs = [laid, stale, failed_again]
    merged = merge_runs(tmp_path / "out", [runs[i].path for i in order])
    out = RunDirectory(tmp_path / "out")
    assert merged.superseded == retractions(out) == 2
    now = current(out)
    assert set(now) == {first, second, third}
    assert now[first].failure is None
    # It failed as it had before, but it is another record: that one was not taken back.
    assert now[second].failure is not None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_was_made_from_a_notebook_that_another_job_replaced_is_taken_back_too(tmp_path, laid, order):
    chain = [k for k in EVERY_KEY if (k.event, k.mode, k.rollout) == ("e00", "memory-on", 0)]
    apart = [k for k in EVERY_KEY if (k.event, k.mode, k.rollout) == ("e00", "memory-free", 0)]
    commit(laid, [*chain[:1], *apart[:1]])
    commit(laid, [chain[1], apart[1]], kind="infrastructure")
    stale = copy(laid, tmp_path / "two")
    commit(stale, [*chain[2:], *apart[2:]])
    retry(laid)
    commit(laid, [chain[1], apart[1]])
    runs = [laid, stale]
    merge_runs(tmp_path / "out", [runs[i].path for i in order])
    out = RunDirectory(tmp_path / "out")
    assert set(current(out)) == {*chain[:2], *apart}
    assert retractions(out) == 4
    assert all(record.failure is None for record in current(out).values())


def test_shares_are_disjoint_complete_and_even():
    for of in range(1, 16):
        shares = [share_of(EVENTS, f"{i}/{of}") for i in range(1, of + 1)]
        assert sorted(e.id for share in shares for e in share) == sorted(e.id for e in EVENTS)
        sizes = {len(share) for share in shares}
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.integers(1, 9).flatmap(lambda of: st.tuples(st.just(of), st.sets(st.integers(1, of), min_size=1))))
def test_joined_shares_hold_what_the_shares_held(case):
    of, numbers = case
    joined = joined_share(f"{n}/{of}" for n in numbers)
    held = {e.id for n in numbers for e in share_of(EVENTS, f"{n}/{of}")}
    assert held == {e.id for e in (EVENTS if joined is None else share_of(EVENTS, joined))}
    Settings.model_validate({"run": {"share": joined}})


@pytest.mark.parametrize("wrong", ["0/4", "5/4", "2,1/4", "1,1/4", "1/0", "a/4", "4", "1/4/2", ""])
def test_a_share_that_is_none_is_refused(wrong):
    with pytest.raises(SettingsError, match=r"run\.share"):
        load_settings([], [f'run.share="{wrong}"'])


def test_merged_shares_are_the_run_that_was_never_divided(tmp_path):
    made = make_world(tmp_path / "world", 4, 8, 60, 4.0)
    common = [write_settings(tmp_path / "world", made)]
    overrides = [
        "index.directory=" + str(tmp_path / "none"),
        "model.kind=uniform",
        "rollout.modes=[no-tools,memory-on]",
    ]
    whole = make_plan(load_settings(common, [*overrides, f"run.directory={tmp_path / 'out'}"]))
    runs = []
    for n in (3, 1, 2):
        plan = make_plan(load_settings(common, [*overrides, f"run.share={n}/3", f"run.directory={tmp_path / str(n)}"]))
        run = RunDirectory(tmp_path / str(n))
        run.create(plan.settings, plan.manifest, plan.events, plan.keys, plan.floor(), plan.unused_rows)
        commit(run, plan.keys)
        runs.append(run)
        assert plan.dropped["other-share"] == len(whole.events) - len(plan.events)
    some = merge_runs(tmp_path / "some", [r.path for r in runs[:2]])
    assert RunDirectory(some.path).settings().run.share == "1,3/3"
    two_thirds = make_plan(load_settings(common, [*overrides, "run.share=1,3/3"]))
    RunDirectory(some.path).check_resumable(two_thirds.manifest)
    merge_runs(tmp_path / "out", [some.path, runs[2].path])
    out = RunDirectory(tmp_path / "out")
    assert out.manifest() == whole.manifest
    assert out.events() == {e.id: e for e in whole.events}
    assert out.floor() == whole.floor()
    with out.ledger() as ledger:
        assert list(ledger.scheduled()) == list(whole.keys)
    summary = execute(whole, resume=True, report=lambda _: None)
    assert (summary.recorded, summary.recorded_now) == (len(whole.keys), 0)


def test_shares_of_different_divisions_are_refused(tmp_path):
    one = lay(RunDirectory(tmp_path / "a"), load_settings([], ["run.share=1/2"]), EVENTS[:6], EVERY_KEY[:96])
    two = lay(RunDirectory(tmp_path / "b"), load_settings([], ["run.share=2/3"]), EVENTS[6:], EVERY_KEY[96:])
    with pytest.raises(SettingsError, match="2 and 3 shares"):
        merge_runs(tmp_path / "out", [one.path, two.path])
