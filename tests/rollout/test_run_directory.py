"""The run directory: laid whole or not at all, held by one process, never another run's."""

import datetime as dt
import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import Settings, load_settings
from cluster.failures import DataError, SettingsError
from retrieval.corpus.rows import QuarantinedRow
from rollout.events.event import Event
from rollout.manifest import make_manifest
from rollout.record import ForecastKey
from rollout.run import RunDirectory, dump_floor, read_floor

REPOSITORY = Path(__file__).parents[2]
DAY = dt.date(2024, 7, 3)
EVENT = Event(
    id="e",
    source="test",
    question="Will it?",
    options=("YES", "NO"),
    opened=dt.datetime(2024, 7, 1, tzinfo=dt.UTC),
    closed=dt.datetime(2024, 7, 9, tzinfo=dt.UTC),
    outcome=("NO",),
)
KEY = ForecastKey(model="uniform", event="e", date=DAY, mode="no-tools", rollout=0)
FLOOR = {("e", DAY): {"YES": 0.25, "NO": 0.75}}
ROW = QuarantinedRow(file="events.jsonl", row=3, id="x", reason="no-outcome", detail="the row carries no outcome")


def lay(run: RunDirectory, floor: object = FLOOR, unused: tuple[QuarantinedRow, ...] = (ROW,)) -> None:
    run.create(Settings(), make_manifest(Settings(), {}), [EVENT], [KEY], floor, unused)


def test_a_new_run_reads_back_as_it_was_laid(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    lay(run)
    assert run.exists
    assert run.settings() == Settings()
    assert run.manifest() == make_manifest(Settings(), {})
    assert run.events() == {"e": EVENT}
    assert run.floor() == FLOOR
    with run.ledger() as ledger:
        assert list(ledger.scheduled()) == [KEY]
    (line,) = (run.quarantine / "events.jsonl").read_text().splitlines()
    assert QuarantinedRow.model_validate_json(line) == ROW


def test_a_started_run_is_not_laid_again_and_keeps_all_it_holds(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lay(run)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(SettingsError, match="holds a run already; resume it with --resume"):
        lay(run, floor={}, unused=())
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_what_a_killed_creation_left_is_laid_anew(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lay(run)
    # The manifest is written last: a creation that was killed has everything but it.
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "events.jsonl.part").write_text("half")
    assert not run.exists
    lay(run, floor={}, unused=())
    assert run.exists
    assert run.events() == {"e": EVENT}
    assert run.floor() == {}, "a floor of the killed creation is not taken for this run's"
    assert not (run.quarantine / "events.jsonl").exists()
    with run.ledger() as ledger:
        assert list(ledger.scheduled()) == [KEY]


def test_a_run_of_other_settings_is_refused_with_every_difference(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lay(run)
    run.check_resumable(make_manifest(Settings(), {}))
    changed = load_settings([], ["rollout.count=2", "run.seed=5"])
    with pytest.raises(SettingsError) as refused:
        run.check_resumable(make_manifest(changed, {"index": "other"}))
    for line in ("inputs.index: 'absent' → 'other'", "settings.rollout.count: 1 → 2", "settings.run.seed: 0 → 5"):
        assert line in str(refused.value)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from rollout.run import RunDirectory; RunDirectory(Path(sys.argv[1])).lock()"
    with RunDirectory(tmp_path).lock():
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert other.returncode == 1
        assert "SettingsError" in other.stderr
        assert "in use by another process" in other.stderr
    RunDirectory(tmp_path).lock().close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_taken_for_a_run_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = RunDirectory(tmp_path)
    lay(run)
    (tmp_path / "lock").touch()

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for lock in (run.lock, run.in_use):
        with pytest.raises(SettingsError, match="its file system has no locks"):
            lock()
    with run.ledger() as ledger, pytest.raises(SettingsError, match="has no locks"):
        ledger.commit([])


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"event": "e", "date": "2024-07-03"}',
        '{"event": "e", "date": "July", "probabilities": {}}',
        "[1, 2]",
        "3",
    ],
)
def test_a_damaged_floor_row_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "floor.jsonl"
    file.write_text(dump_floor(FLOOR) + line + "\n")
    with pytest.raises(DataError, match=r"floor\.jsonl, row 2: not a floor row"):
        read_floor(file)


@pytest.mark.parametrize(
    "probabilities",
    [{}, [0.5, 0.5], "YES", {"YES": "0.5"}, {"YES": 1.5, "NO": -0.5}, {"YES": True}, {"YES": float("nan")}],
)
def test_a_floor_row_without_probabilities_is_named(tmp_path: Path, probabilities: object) -> None:
    file = tmp_path / "floor.jsonl"
    file.write_text(json.dumps({"event": "e", "date": "2024-07-03", "probabilities": probabilities}) + "\n")
    with pytest.raises(DataError, match="row 1: not a floor row"):
        read_floor(file)


def test_a_missing_file_says_that_this_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run directory: manifest\.json is missing"):
        RunDirectory(tmp_path).manifest()
