"""What a ledger holds is in its mirror, whatever the store does, and a run comes back from its mirror alone."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from flaky_store import register
from hypothesis import given
from hypothesis import strategies as st
from mirrored_run import EVERY_KEY, lay, packed

from cluster.config import RunSettings, Settings
from cluster.failures import DataError, SettingsError
from rollout.manifest import make_manifest
from rollout.mirror import Mirror, MirrorState, Pace, mirrored, restore, take_up
from rollout.mirror_store import MirrorUnreachable
from rollout.run import RunDirectory

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@pytest.fixture(autouse=True, scope="module")
def _flaky():
    register()


def contents(run):
    with run.ledger() as ledger:
        return list(ledger.scheduled()), ledger.changes(0, 10**6)


def settings(address, lag_s=0.2, records=20):
    return RunSettings(mirror=address, mirror_lag_s=lag_s, mirror_records=records)


def ship(run, address):
    mirror = Mirror(run, address, 0.2, 20).start()
    return mirror.close(30)


def parts(folder):
    return sorted(folder.glob("parts/*/*.parquet"))


def test_a_restored_run_is_the_run(tmp_path):
    run, address = lay(RunDirectory(tmp_path / "run")), f"file://{tmp_path}/mirror"
    with run.ledger() as ledger, mirrored(run, settings(address)):
        ledger.commit([packed(k) for k in EVERY_KEY[:50]])
        ledger.commit([packed(k, kind="infrastructure") for k in EVERY_KEY[50:60]])
        time.sleep(0.3)
        ledger.retry({"infrastructure"}, "asked for")
        ledger.commit([packed(k, 0.9) for k in EVERY_KEY[50:55]])
    again = RunDirectory(tmp_path / "again")
    assert restore(again, address)
    assert contents(again) == contents(run)
    assert len(contents(run)[1]) == 75
    for name, file in run.start_files().items():
        assert (again.path / name).read_bytes() == file.read_bytes()
    assert set(again.start_files()) == set(run.start_files())


def test_a_mirror_goes_on_where_it_was(tmp_path):
    run, address = lay(RunDirectory(tmp_path / "run")), "memory://goes-on"
    for end in (30, 30, 77):
        with run.ledger() as ledger, mirrored(run, settings(address)):
            ledger.commit([packed(k) for k in EVERY_KEY[:end]])
    again = RunDirectory(tmp_path / "again")
    assert restore(again, address)
    assert contents(again) == contents(run)


def test_a_mirror_without_a_run_restores_none(tmp_path):
    assert not restore(RunDirectory(tmp_path / "run"), f"file://{tmp_path}/empty")
    assert not RunDirectory(tmp_path / "run").exists


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_fails_at_random_ends_up_with_every_change(tmp_path, seed):
    store = tmp_path / "store"
    run, address = lay(RunDirectory(tmp_path / "run")), f"flaky://{seed}{store}"
    chance = random.Random(seed)
    left = list(EVERY_KEY)
    with run.ledger() as ledger:
        mirror = Mirror(run, address, 0.2, 20).start()
        while left:
            batch, left = left[: (n := chance.randrange(1, 25))], left[n:]
            ledger.commit([packed(k, kind=chance.choice([None, None, "model"])) for k in batch])
            if chance.random() < 0.2:
                ledger.retry({"model"}, "asked for")
                left = [k for k in EVERY_KEY if k not in ledger.finished()]
            time.sleep(chance.uniform(0, 0.1))
        state = mirror.close(40)
    assert (state.unshipped, state.fault) == (0, "")
    (store / "healed").touch()
    again = RunDirectory(tmp_path / "again")
    assert restore(again, address)
    assert contents(again) == contents(run)


def test_a_store_that_fails_at_random_is_restored_from(tmp_path):
    run, address = lay(RunDirectory(tmp_path / "run")), f"flaky://r{tmp_path}/store"
    (tmp_path / "store").mkdir()
    healed = tmp_path / "store" / "healed"
    healed.touch()
    with run.ledger() as ledger:
        ledger.commit([packed(k) for k in EVERY_KEY])
    assert ship(run, address).unshipped == 0
    healed.unlink()
    again = RunDirectory(tmp_path / "again")
    assert restore(again, address)
    assert contents(again) == contents(run)


def test_a_run_whose_driver_is_killed_and_whose_directory_is_deleted_comes_back(tmp_path):
    chance = random.Random(7)
    run, folder = RunDirectory(tmp_path / "run"), tmp_path / "store"
    seen = {}
    for sitting in range(3):
        command = [sys.executable, HERE / "mirrored_run.py", run.path, f"flaky://{sitting}{folder}"]
        environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{HERE}"}
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE) as driver:
            before = len(list(folder.glob("parts/*/*.committed")))
            while len(list(folder.glob("parts/*/*.committed"))) <= before and driver.stdout.readline():
                pass
            for _ in range(chance.randrange(10)):
                driver.stdout.readline()
            assert driver.poll() is None, "the driver ended before it could be killed"
            driver.send_signal(signal.SIGKILL)
        with run.ledger() as ledger:
            now = {r.key: r for r in ledger.records()}
        kept = set(now) & set(seen)
        assert all(now[k] == seen[k] for k in kept), "a record that was kept was made again"
        shutil.rmtree(run.path)
        again = RunDirectory(tmp_path / f"look{sitting}")
        if restore(again, f"flaky://x{folder}"):
            with again.ledger() as ledger:
                seen = {r.key: r for r in ledger.records()}
            assert seen.items() <= now.items()
    assert seen, "nothing had been shipped: the kills came too early to test anything"
    (folder / "healed").touch()
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL)
    with run.ledger() as ledger:
        records = list(ledger.records())
    assert Counter(r.key for r in records) == Counter(EVERY_KEY)
    assert all({r.key: r for r in records}[k] == r for k, r in seen.items())


def test_an_outage_is_loud_once_never_blocks_and_is_caught_up_with(tmp_path, caplog):
    mount = tmp_path / "mount"
    mount.write_text("a file where the folder of the mirror should be")
    run, address = lay(RunDirectory(tmp_path / "run")), f"file://{mount}/mirror"
    with run.ledger() as ledger, caplog.at_level(logging.ERROR):
        mirror = Mirror(run, address, 0.2, 20)
        mirror._thread.start()
        for i in range(0, len(EVERY_KEY), 20):
            assert all(ledger.commit([packed(k) for k in EVERY_KEY[i : i + 20]]))
        deadline = time.monotonic() + 20
        while not mirror.state().fault and time.monotonic() < deadline:
            time.sleep(0.02)
        state = mirror.state()
        assert "cannot be reached" in caplog.text
        assert (state.shipped, state.parts) == (0, 0)
        assert state.fault
        mount.unlink()
        state = mirror.close(30)
    assert (state.unshipped, state.fault, state.shipped) == (0, "", len(EVERY_KEY))
    assert sum("cannot be reached" in r.getMessage() for r in caplog.records) == 1
    assert restore(RunDirectory(tmp_path / "again"), address)


def test_the_end_of_a_run_says_what_is_not_shipped(tmp_path, caplog):
    mount = tmp_path / "mount"
    mount.write_text("a file where the folder of the mirror should be")
    run = lay(RunDirectory(tmp_path / "run"))
    with run.ledger() as ledger:
        ledger.commit([packed(k) for k in EVERY_KEY[:9]])
    mirror = Mirror(run, f"file://{mount}/mirror", 0.2, 20)
    mirror._thread.start()
    state = mirror.close(1.0)
    assert state.unshipped == 9
    assert f"9 changes are only in {run.path} and not in the mirror" in caplog.text


def test_a_half_written_part_is_not_taken_and_a_damaged_one_is_refused_by_name(tmp_path):
    run, store = lay(RunDirectory(tmp_path / "run")), tmp_path / "store"
    address = f"file://{store}"
    for end in (30, 60):
        with run.ledger() as ledger, mirrored(run, settings(address, records=100)):
            ledger.commit([packed(k) for k in EVERY_KEY[:end]])
    *_, last = parts(store)
    torn = last.with_name(last.name.replace("00000002-31-60", "00000003-61-90"))
    torn.write_bytes(last.read_bytes()[:100])
    again = RunDirectory(tmp_path / "again")
    assert restore(again, address)
    assert contents(again) == contents(run)
    last.write_bytes(last.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=rf"{last.name} is damaged"):
        restore(RunDirectory(tmp_path / "other"), address)
    assert not RunDirectory(tmp_path / "other").exists
    last.unlink()
    with pytest.raises(DataError, match=rf"{last.name} is missing"):
        restore(RunDirectory(tmp_path / "other"), address)


def test_a_missing_middle_part_is_refused_by_number(tmp_path):
    run, store = lay(RunDirectory(tmp_path / "run")), tmp_path / "store"
    with run.ledger() as ledger:
        ledger.commit([packed(k) for k in EVERY_KEY])
    assert ship(run, f"file://{store}").parts == 10
    middle = parts(store)[4]
    middle.with_name(middle.name + ".committed").unlink()
    with pytest.raises(DataError, match="part 5 is missing"):
        restore(RunDirectory(tmp_path / "other"), f"file://{store}")


def test_a_damaged_start_file_is_refused_by_name(tmp_path):
    run, store = lay(RunDirectory(tmp_path / "run")), tmp_path / "store"
    ship(run, f"file://{store}")
    (events,) = store.glob("start/*/events.jsonl")
    events.write_text("{}")
    with pytest.raises(DataError, match=r"events\.jsonl is damaged"):
        restore(RunDirectory(tmp_path / "other"), f"file://{store}")


def test_a_mirror_of_another_run_is_refused_with_every_difference(tmp_path):
    address = f"file://{tmp_path}/store"
    ship(lay(RunDirectory(tmp_path / "one")), address)
    other = Settings().model_copy(update={"sampling": Settings().sampling.model_copy(update={"temperature": 0.5})})
    two = lay(RunDirectory(tmp_path / "two"), other)
    with pytest.raises(SettingsError, match=r"settings\.sampling\.temperature: 1\.0 → 0\.5"):
        Mirror(two, address, 0.2, 20).start()


def test_a_directory_that_is_older_than_its_mirror_is_refused(tmp_path):
    run, address = lay(RunDirectory(tmp_path / "run")), f"file://{tmp_path}/store"
    shutil.copytree(run.path, tmp_path / "old")
    with run.ledger() as ledger, mirrored(run, settings(address)):
        ledger.commit([packed(k) for k in EVERY_KEY[:5]])
    old = RunDirectory(tmp_path / "old")
    with pytest.raises(SettingsError, match="older than its mirror"):
        Mirror(old, address, 0.2, 20).start()
    with old.ledger() as ledger:
        ledger.commit([packed(k, 0.1) for k in EVERY_KEY[:8]])
    with pytest.raises(SettingsError, match="two drivers went on from one"):
        Mirror(old, address, 0.2, 20).start()


def test_a_second_driver_on_the_same_mirror_is_found_out(tmp_path, caplog):
    run, address = lay(RunDirectory(tmp_path / "run")), f"file://{tmp_path}/store"
    zombie = Mirror(run, address, 0.2, 20).start()
    again = RunDirectory(tmp_path / "again")
    assert restore(again, address)
    with again.ledger() as ledger:
        ledger.commit([packed(k, 0.1) for k in EVERY_KEY[:3]])
    assert ship(again, address).unshipped == 0
    with run.ledger() as ledger:
        ledger.commit([packed(k, 0.2) for k in EVERY_KEY[:3]])
    state = zombie.close(10)
    assert "another driver ships the same run" in state.fault
    assert "nothing is shipped any more" in caplog.text
    back = RunDirectory(tmp_path / "back")
    assert restore(back, address)
    assert contents(back) == contents(again)


def test_an_address_of_an_unknown_protocol_is_a_setting_to_mend(tmp_path):
    run = lay(RunDirectory(tmp_path / "run"))
    with pytest.raises(SettingsError, match=r"run\.mirror 'nowhere://x' is no address"):
        Mirror(run, "nowhere://x", 1.0, 20)


def test_an_unreachable_mirror_is_not_taken_for_an_empty_one(tmp_path):
    mount = tmp_path / "mount"
    mount.write_text("")
    with pytest.raises(MirrorUnreachable, match="mirror-unreachable"):
        restore(RunDirectory(tmp_path / "run"), f"file://{mount}/mirror", patience_s=0.2)


_STEP = st.tuples(st.floats(0, 20), st.integers(0, 40), st.booleans())


@given(st.lists(_STEP, max_size=60), st.floats(0.5, 60), st.integers(1, 200))
def test_a_reachable_mirror_never_lags_by_more_than_half_the_bound_unasked(steps, lag_s, records):
    pace = Pace(lag_s, records)
    now, last = 0.0, 0
    for wait, new, works in steps:
        # The thread looks every tick; time passes in ticks.
        for _ in range(1 + int(wait / pace.tick_s)):
            now += pace.tick_s
            pace.saw(now, last)
            if pace.due(now, False):
                if not works:
                    pace.failed(now, False)
                    continue
                pace.shipped(last)
            if works and pace.may_try(now):
                assert pace.lag_s(now) <= pace.half_lag_s
                assert pace.unshipped < records
        last += new


def test_a_state_names_its_mirror(tmp_path):
    run = lay(RunDirectory(tmp_path / "run"))
    state = ship(run, f"file://{tmp_path}/store/")
    assert state == MirrorState(
        address=f"file://{tmp_path}/store", parts=0, shipped=0, unshipped=0, lag_s=0.0, fault=""
    )


def test_a_mirror_that_holds_the_run_is_taken_up_when_it_is_resumed_and_refused_when_it_is_begun(tmp_path):
    run, address = lay(RunDirectory(tmp_path / "run")), f"file://{tmp_path}/store"
    manifest = run.manifest()
    gone = RunDirectory(tmp_path / "gone")
    take_up(gone, address, manifest, resume=True)
    assert not gone.exists, "an empty mirror is a new run's"
    ship(run, address)
    with pytest.raises(SettingsError, match="--resume restores it"):
        take_up(gone, address, manifest, resume=False)
    other = make_manifest(Settings(), {"schedule": "another"})
    for resume in (True, False):
        with pytest.raises(SettingsError, match=r"holds another run .*\n.*inputs\.events"):
            take_up(gone, address, other, resume)
    assert not gone.exists
    take_up(gone, address, manifest, resume=True)
    assert contents(gone) == contents(run)
