"""What coordination alone costs: whole runs whose model answers at once, each in a process of its own; and resuming one."""

import contextlib
import json
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from cluster.config import Settings, load_settings
from cluster.record import Record
from cluster.session import start_session
from rollout.events.world import make_world, write_settings
from rollout.execute import execute
from rollout.plan import make_plan
from rollout.progress import Progress

WARM_SHARE = 0.02
"""Of a run: the rate is counted from here on, when workers are up."""


REOPENED = 10
"""Forecasts that a resumption finds open."""


class Capacity(Record):
    """One size of run."""

    forecasts: int
    per_second: float
    rss_mb: float
    """Largest resident memory of the driver, in MiB."""
    worker_rss_mb: float
    """Of the largest other process of the run at its end, in MiB."""
    ledger_bytes: int
    """Per forecast."""


def measure_capacity(folder: Path, forecasts: int, workers: int, say: Callable[[str], None]) -> Capacity:
    """A whole run in a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "scripts.bench.capacity", str(folder), str(forecasts), str(workers)]
    measured = Capacity.model_validate_json(_last_line(command))
    say(f"{measured.forecasts} forecasts: {measured.per_second:.0f}/s, driver {measured.rss_mb:.0f} MiB")
    return measured


def measure_resume(folder: Path) -> float:
    """Seconds from opening the run that `measure_capacity` left to its first lease, with ten forecasts taken back."""
    command = [sys.executable, "-m", "scripts.bench.capacity", str(folder), "resume"]
    return float(json.loads(_last_line(command)))


def _last_line(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]


def capacity_settings(folder: Path, forecasts: int, workers: int) -> Settings:
    """A world of as many events and repetitions as `forecasts` needs; two modes, so that half are chains."""
    events = min(250, max(20, forecasts // 40))
    world = make_world(folder, seed=1, events=events, days=120, articles_per_day=0.1)
    overrides = [
        "model.kind=uniform",
        "rollout.modes=[memory-free, memory-on]",
        "rollout.splits=[train, eval]",
        f"rollout.workers={workers}",
        "rollout.concurrency=200",
        f"run.directory={folder / 'run'}",
    ]
    settings = load_settings([write_settings(folder, world)], overrides)
    once = len(make_plan(settings).keys)
    return load_settings([folder / "settings.yaml"], [*overrides, f"rollout.count={max(1, round(forecasts / once))}"])


def _run(folder: Path, forecasts: int, workers: int) -> Capacity:
    plan = make_plan(capacity_settings(folder, forecasts, workers))
    seen: list[tuple[float, int]] = []
    largest = 0.0

    def watch(progress: Progress) -> None:
        nonlocal largest
        seen.append((time.monotonic(), progress.done))
        children = psutil.Process().children(recursive=True)
        sizes = [c.memory_info().rss for c in children if "Worker" in c.name() or "ray::" in c.name()]
        largest = max([largest, *sizes])

    summary = execute(plan, resume=False, report=watch)
    if summary.recorded != len(plan.keys) or summary.failures:
        raise RuntimeError(f"the benchmark's run ended with {summary}")
    warm = next(i for i, (_, done) in enumerate(seen) if done >= WARM_SHARE * len(plan.keys))
    (began, before), (ended, after) = seen[warm], seen[-1]
    if ended == began:
        raise RuntimeError(f"{forecasts} forecasts were recorded at once, which gives no rate; take more")
    return Capacity(
        forecasts=len(plan.keys),
        per_second=(after - before) / (ended - began),
        rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        worker_rss_mb=largest / 2**20,
        ledger_bytes=(folder / "run" / "ledger.sqlite").stat().st_size // len(plan.keys),
    )


def _resume(folder: Path) -> float:
    """Seconds from asking for the resumption to the first running step; Ray is up before, the worker is started within."""
    settings = load_settings([folder / "run" / "settings.yaml"])
    with contextlib.closing(sqlite3.connect(folder / "run" / "ledger.sqlite")) as connection, connection:
        connection.execute(
            f"DELETE FROM current WHERE position IN (SELECT position FROM current ORDER BY position DESC LIMIT {REOPENED})"
        )
    started: list[float] = []

    def watch(progress: Progress) -> None:
        if progress.running or progress.done == progress.total:
            started.append(time.monotonic())

    with start_session(settings.ray):
        began = time.monotonic()
        summary = execute(make_plan(settings), resume=True, report=watch)
    if summary.recorded_now != REOPENED:
        raise RuntimeError(f"the benchmark's resumption ended with {summary}")
    return started[0] - began


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if sys.argv[2] == "resume":
        sys.stdout.write(json.dumps(_resume(where)) + "\n")
        raise SystemExit
    sys.stdout.write(_run(where, int(sys.argv[2]), int(sys.argv[3])).model_dump_json() + "\n")
