"""The whole run, killed with SIGKILL at random moments and resumed: each scheduled forecast is recorded once."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rollout.run import RunDirectory

pytestmark = [pytest.mark.ray, pytest.mark.e2e]

REPO = Path(__file__).resolve().parents[2]
KILLS = 3
"""While forecasts are being recorded."""
STARTUP_KILLS = 2
SEED = 20261130


def pastcast(*arguments):
    return [sys.executable, "-c", "from scripts.cli import main; main()", *map(str, arguments)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    make = [
        "world",
        "make",
        "--seed",
        3,
        "--events",
        12,
        "--days",
        60,
        "--articles-per-day",
        8,
        "--out",
        folder / "world",
    ]
    subprocess.run(pastcast(*make), cwd=REPO, check=True)
    build = ["index", "build", *_settings(folder)]
    subprocess.run(pastcast(*build), cwd=REPO, check=True)
    return folder


def _settings(folder):
    values = {
        "events.path": folder / "world/events.jsonl",
        "events.floor": folder / "world/floor.jsonl",
        "articles.path": folder / "world/articles.jsonl",
        "index.directory": folder / "index",
        "index.encoder": "hashing",
        "run.directory": folder / "run",
        "model.kind": "reader",
        "rollout.prompt": "compact",
        "rollout.count": 2,
        "rollout.concurrency": 8,
        "ray.cpus": 2,
    }
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def start(world):
    command = pastcast("rollout", *_settings(world), "--resume")
    return subprocess.Popen(command, cwd=REPO, start_new_session=True, stdout=subprocess.DEVNULL)


def test_a_killed_run_loses_and_repeats_nothing(world):
    chance = random.Random(SEED)
    run = RunDirectory(world / "run")
    seen: dict = {}
    killed_at = []
    for _ in range(STARTUP_KILLS):
        # Anywhere between the first byte of the run directory and the first leases.
        process = start(world)
        time.sleep(chance.uniform(0.5, 6.0))
        assert process.poll() is None, f"the run ended by itself ({process.returncode}) before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if _recorded(run):
            break
    while len(killed_at) < KILLS:
        process = start(world)
        # A kill counts only when the run is under way: wait until it has recorded something new, then a random while.
        before = _recorded(run)
        while process.poll() is None and _recorded(run) <= before:
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 1.0))
        assert process.poll() is None, f"the run ended by itself ({process.returncode}) before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with run.ledger() as ledger:
            now = {r.key: r for r in ledger.records()}
        assert all(now[key] == record for key, record in seen.items()), "a record was lost or drawn again"
        seen = now
        killed_at.append(len(now))
        if len(now) == len(run_schedule(run)):
            break
    subprocess.run(pastcast("rollout", *_settings(world), "--resume"), cwd=REPO, check=True)
    with run.ledger() as ledger:
        scheduled, records = list(ledger.scheduled()), list(ledger.records())
    print(f"killed with {killed_at} of {len(scheduled)} forecasts recorded")
    assert Counter(r.key for r in records) == Counter(scheduled), "each scheduled forecast once"
    assert all(r.failure is None for r in records)
    assert killed_at[0] < len(scheduled), "the first kill came too late to test anything"
    final = {r.key: r for r in records}
    assert all(final[key] == record for key, record in seen.items())


def run_schedule(run):
    with run.ledger() as ledger:
        return list(ledger.scheduled())


def _recorded(run):
    if not run.exists:
        return 0
    with run.ledger() as ledger:
        return len(ledger.finished())


def test_a_run_directory_is_not_shared_with_other_settings(world):
    subprocess.run(pastcast("rollout", *_settings(world), "--resume"), cwd=REPO, check=True)
    again = subprocess.run(pastcast("rollout", *_settings(world)), cwd=REPO, capture_output=True, text=True)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    changed = [*_settings(world), "--set", "rollout.budget.calls=3", "--resume"]
    other = subprocess.run(pastcast("rollout", *changed), cwd=REPO, capture_output=True, text=True)
    assert other.returncode == 2
    assert "rollout.budget.calls" in other.stderr


def test_a_run_that_is_interrupted_by_either_signal_stops_cleanly_and_goes_on(world):
    settings = [*_settings(world), "--set", f"run.directory={world / 'interrupted'}"]
    run = RunDirectory(world / "interrupted")
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before = _recorded(run)
        process = subprocess.Popen(pastcast("rollout", *settings, "--resume"), cwd=REPO, start_new_session=True)
        while process.poll() is None and _recorded(run) < before + 3:
            time.sleep(0.05)
        os.kill(process.pid, number)
        assert process.wait(timeout=120) == status
        at_stop = _recorded(run)
        assert before + 3 <= at_stop < len(run_schedule(run))
    subprocess.run(pastcast("rollout", *settings, "--resume"), cwd=REPO, check=True)
    with run.ledger() as ledger:
        assert Counter(r.key for r in ledger.records()) == Counter(ledger.scheduled())
