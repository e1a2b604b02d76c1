"""A run's status can be read by anyone at any time, says when its driver is gone, and is what the metrics say."""

import datetime as dt
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mirrored_run import EVERY_KEY, lay, packed
from rich.console import Console

from cluster.config import RaySettings, RunSettings
from cluster.failures import DataError
from cluster.pool_view import EngineView, PoolView
from cluster.session import start_session
from rollout.metrics import RunMetrics, metrics_address
from rollout.mirror import Mirror, mirrored
from rollout.progress import Progress
from rollout.run import RunDirectory
from rollout.status import Rate, StatusWriter, read_status
from scripts.status_page import status_page

REPOSITORY = Path(__file__).parents[2]
NOON = dt.datetime(2030, 6, 1, 12, tzinfo=dt.UTC)
ENGINE = EngineView(
    engine=1,
    state="RESTARTING",
    node="node-b",
    sessions=3,
    outstanding_tokens=900,
    running=2,
    waiting=4,
    kv_cache_use=0.5,
    restarts=1,
    weights="w",
)
POOL = PoolView(
    engines=(ENGINE.model_copy(update={"engine": 0, "state": "HEALTHY"}), ENGINE), limit=64, paused="too few engines"
)


def progress(done=10, total=192, **other):
    values = {"running": 7, "failures": {"no-answer": 2}, "retried": 3, "output_tokens": done * 100, "price": 1.5}
    values |= {"seconds": 5.0, "done_now": done, "stage": "running"} | other
    return Progress(total=total, done=done, **values)


@pytest.fixture
def run(tmp_path):
    return lay(RunDirectory(tmp_path / "run"))


def page(report):
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(status_page(report))
    return console.export_text()


class Time:
    """Both clocks of a driver, moved by hand."""

    def __init__(self):
        self.seconds = 0.0

    def writer(self, run, **other):
        return StatusWriter(
            run, clock=lambda: NOON + dt.timedelta(seconds=self.seconds), seconds=lambda: self.seconds, **other
        )


def test_a_status_says_rate_expected_end_engines_failures_and_cost(run):
    time_, said = Time(), []
    writer = time_.writer(run, publish=said.append)
    for second in range(0, 21):
        time_.seconds = float(second)
        writer.tell(progress(done=second), POOL)
    status = said[-1]
    assert status.per_second == pytest.approx(1.0)
    assert status.tokens_per_second == pytest.approx(100.0)
    assert status.expected_end == NOON + dt.timedelta(seconds=20 + 172)
    assert status.engines == POOL.engines
    with run.ledger() as ledger:
        ledger.commit([packed(k, kind="model", reason="no-answer") for k in EVERY_KEY[:2]])
    with run.lock():
        report = read_status(str(run.path), clock=lambda: NOON + dt.timedelta(seconds=23))
    assert (report.status, report.age_s, report.driver) == (status, 3.0, True)
    text = page(report)
    for shown in (
        "2 of 192",
        "1.00 forecasts/s",
        "12:03 UTC",
        "$1.50",
        "RESTARTING",
        "node-b",
        "no-answer",
        "too few engines",
    ):
        assert shown in text, text


def test_the_rate_is_that_of_the_last_minutes():
    rate = Rate(window_s=100.0)
    for second in range(1000):
        rate.add(float(second), second * 5 if second < 800 else 4000 + (second - 800), 0)
    per_second, _ = rate.per_second(999.0, 4199, 0)
    assert per_second == pytest.approx(1.0, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 9)), max_size=50))
def test_a_rate_is_never_negative_and_needs_little_memory(steps):
    rate, now, done = Rate(30.0), 0.0, 0
    for wait, more in steps:
        now, done = now + wait, done + more
        rate.add(now, done, done)
        assert all(r >= 0 for r in rate.per_second(now, done, done))
    assert len(rate._points) <= 302


def test_it_is_written_once_a_second_and_whole(run):
    time_, said = Time(), []
    writer = time_.writer(run, publish=said.append)
    for tenth in range(0, 31):
        time_.seconds = tenth / 10
        writer.tell(progress(), None)
        json.loads((run.path / "status.json").read_text())
    assert len(said) == 4


def test_a_run_that_goes_on_on_another_machine_is_read_from_its_drivers_word(run, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "the-other-machine")
    Time().writer(run).tell(progress(done=7), None)
    monkeypatch.setattr("platform.node", lambda: "this-machine")
    with run.lock():
        report = read_status(str(run.path))
    assert (report.driver, report.done, report.failures) == (True, 7, report.status.failures)
    assert read_status(str(run.path)).done == 0, "without a driver the ledger says it"


def test_a_status_that_cannot_be_written_ends_nothing(run, caplog):
    (run.path / "status.json.part").mkdir()
    time_, said = Time(), []
    writer = time_.writer(run, publish=said.append)
    for second in range(3):
        time_.seconds = float(second)
        writer.tell(progress(), None)
    writer.end("complete")
    assert len(said) == 4
    assert [r.message.split(" could not")[0] for r in caplog.records] == [str(run.path / "status.json")]


def test_the_last_word_says_why_the_driver_ended(run):
    writer = Time().writer(run)

    def work():
        with writer:
            writer.tell(progress(), POOL)
            raise RuntimeError("the pool is lost")

    with pytest.raises(RuntimeError):
        work()
    report = read_status(str(run.path))
    assert report.status.ended == "RuntimeError: the pool is lost"
    assert (report.status.engines, report.status.running) == ((), 0)
    assert "its driver ended (RuntimeError: the pool is lost)" in report.verdict
    assert "go on with --resume" in report.verdict


def test_a_killed_driver_is_said_to_be_gone(run):
    code = (
        "import sys, time; from pathlib import Path; from rollout.run import RunDirectory; from rollout.status import *; "
        "from rollout.progress import Progress; run = RunDirectory(Path(sys.argv[1])); lock = run.lock(); "
        f"StatusWriter(run).tell(Progress.model_validate_json({progress().model_dump_json()!r}), None); "
        "print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, run.path], cwd=REPOSITORY, stdout=subprocess.PIPE) as driver:
        driver.stdout.readline()
        report = read_status(str(run.path))
        assert report.driver
        assert f"process {driver.pid}" in report.verdict
        driver.send_signal(signal.SIGKILL)
    report = read_status(str(run.path))
    assert report.driver is False
    assert "gone without a word" in report.verdict
    # Asking does not stand in the way of a new driver.
    run.lock().close()


def test_a_run_that_is_complete_says_so_even_without_a_status(run):
    assert "none has said anything" in read_status(str(run.path)).verdict
    with run.ledger() as ledger:
        ledger.commit([packed(k) for k in EVERY_KEY])
    assert read_status(str(run.path)).verdict.startswith("complete")


def test_a_mirror_shows_the_status_of_a_run_whose_directory_is_gone(run, tmp_path):
    address = f"file://{tmp_path}/store"
    settings = RunSettings(mirror=address, mirror_lag_s=0.2)
    with run.ledger() as ledger, mirrored(run, settings) as mirror:
        ledger.commit([packed(k) for k in EVERY_KEY[:9]])
        Time().writer(run, mirror=mirror).tell(progress(done=9), POOL)
    shutil.rmtree(run.path)
    report = read_status(address, clock=lambda: NOON + dt.timedelta(hours=5))
    assert (report.driver, report.parts, report.shipped, report.done) == (None, 1, 9, 9)
    assert report.status.mirror.address == address
    assert "last heard of 5.0 h ago" in page(report)
    with pytest.raises(DataError, match="holds no run"):
        read_status(f"file://{tmp_path}/nowhere")


def test_the_last_word_says_how_far_the_mirror_came(run, tmp_path):
    settings = RunSettings(mirror=f"file://{tmp_path}/store", mirror_lag_s=3600)
    with run.ledger() as ledger, mirrored(run, settings) as mirror:
        writer = Time().writer(run, mirror=mirror)
        ledger.commit([packed(k) for k in EVERY_KEY])
        writer.tell(progress(done=192), POOL)
        writer.end("complete")
    writer.settle()
    report = read_status(str(run.path))
    assert (report.status.ended, report.status.mirror.shipped, report.status.mirror.unshipped) == ("complete", 192, 0)
    assert "all is shipped" in page(report)
    assert "behind" not in page(read_status(settings.mirror)), "what it holds is told by its parts"


def test_a_mirror_without_a_status_still_says_what_it_holds(run, tmp_path):
    Mirror(run, f"file://{tmp_path}/store", 0.2, 20).start().close(10)
    report = read_status(f"file://{tmp_path}/store")
    assert (report.status, report.parts, report.scheduled, report.done) == (None, 0, 192, None)
    assert "none has said anything" in report.verdict
    assert "? of 192" in page(report)


def test_the_command_prints_a_page_or_json(run):
    def ask(*options):
        command = [sys.executable, "-m", "scripts", "status", str(run.path), *options]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    Time().writer(run).tell(progress(), POOL)
    assert json.loads(ask("--json"))["status"]["engines"][1]["state"] == "RESTARTING"
    assert "RESTARTING" in ask()
    assert "gone without a word" in ask("--watch"), "it ends by itself when no driver works on the run"


@pytest.mark.ray
def test_the_metrics_endpoint_of_a_session_shows_the_run(run):
    with start_session(RaySettings(cpus=1)):
        metrics = RunMetrics("f" * 64)
        writer = Time().writer(run)
        writer.measure(metrics.publish, metrics_address())
        writer.tell(progress(), POOL)
        wanted = {
            "ray_pastcast_forecasts_done": 10.0,
            "ray_pastcast_forecasts_scheduled": 192.0,
            "ray_pastcast_forecasts_recorded_total": 10.0,
            "ray_pastcast_price_dollars": 1.5,
            "ray_pastcast_paused": 1.0,
            'ray_pastcast_failures{reason="no-answer"}': 2.0,
            'ray_pastcast_engines{state="RESTARTING"}': 1.0,
            'ray_pastcast_engine_waiting{engine="1"}': 4.0,
        }
        address = read_status(str(run.path)).status.metrics
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with urllib.request.urlopen(address, timeout=10) as answer:
                found = samples(answer.read().decode())
            if wanted.items() <= found.items():
                break
            time.sleep(1)
        assert wanted.items() <= found.items(), found
        # An engine that has left is not seen to work for ever.
        metrics.publish(read_status(str(run.path)).status.model_copy(update={"engines": ()}))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and found['ray_pastcast_engine_waiting{engine="1"}']:
            with urllib.request.urlopen(address, timeout=10) as answer:
                found = samples(answer.read().decode())
            time.sleep(1)
        assert found['ray_pastcast_engine_waiting{engine="1"}'] == 0.0


def samples(text):
    """Value by name, with the tags `reason`, `state` and `engine` where there are any."""
    found = {}
    for line in text.splitlines():
        if line.startswith("ray_pastcast"):
            assert 'run="ffffffffffff"' in line
            name, tags, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()
            kept = re.findall(r'(?:^|,)((?:reason|state|engine)="[^"]*")', tags)
            found[name + (f"{{{','.join(kept)}}}" if kept else "")] = float(value)
    return found
