"""A small run for the tests of mirrors, merges and exports. As a program, a driver that mirrors it until it is killed:
`mirrored_run.py DIRECTORY ADDRESS` restores the run if need be and commits what is missing, one forecast after the other.
"""

import datetime as dt
import sys
import time
from pathlib import Path

from flaky_store import register

from cluster.config import RunSettings, Settings
from cluster.failures import Failure
from rollout.events.event import Event
from rollout.manifest import content_hashes, make_manifest
from rollout.mirror import mirrored, restore
from rollout.packed import pack
from rollout.record import ForecastKey, ForecastRecord, Usage
from rollout.report import Report
from rollout.run import RunDirectory
from rollout.trajectory import Trajectory, Turn

DAY = dt.date(2024, 7, 3)
EVENTS = [
    Event(
        id=f"e{i:02}",
        source="test",
        question="Will it?",
        options=("YES", "NO"),
        opened=dt.datetime(2024, 7, 1, tzinfo=dt.UTC),
        closed=dt.datetime(2024, 7, 29, tzinfo=dt.UTC),
        outcome=("NO",),
    )
    for i in range(12)
]
EVERY_KEY = [
    ForecastKey(model="m", event=e.id, date=DAY + dt.timedelta(days=d), mode=m, rollout=r)
    for e in EVENTS
    for m in ("memory-free", "memory-on")
    for r in range(2)
    for d in range(4)
]
FLOOR = {(e.id, DAY): {"YES": 0.25, "NO": 0.75} for e in EVENTS}


def record(key, p=0.5, failure=None):
    report = Report(probabilities={"YES": p, "NO": 1 - p}, verdict="ok", usable_strict=True, usable_lenient=True)
    usage = Usage(output_tokens=3, price=0.5)
    return ForecastRecord(key=key, options=("YES", "NO"), report=report, failure=failure, usage=usage, prompt="x")


def packed(key, p=0.5, kind=None, reason="gone"):
    failure = Failure(kind=kind, reason=reason) if kind else None
    turn = Turn(messages=(), prompt_ids=(1, 2), sampled_ids=(3, 4), logprobs=(-0.5, -1e-7), text=f"{key.event} ü\u2028")
    return pack(record(key, p, failure), Trajectory(turns=(turn,)))


def lay(run, settings=None, events=EVENTS, keys=EVERY_KEY):
    settings = settings or Settings()
    floor = {(e, day): p for (e, day), p in FLOOR.items() if e in {event.id for event in events}}
    run.create(settings, make_manifest(settings, content_hashes(events, keys)), events, keys, floor)
    return run


def drive(directory, address):
    run = RunDirectory(Path(directory))
    if not run.exists and not restore(run, address):
        lay(run)
    settings = RunSettings(mirror=address, mirror_lag_s=0.2, mirror_records=20)
    with run.ledger() as ledger, mirrored(run, settings):
        done = ledger.finished()
        for number, key in enumerate(k for k in EVERY_KEY if k not in done):
            # A number of its own for every time that a forecast is made: a record that was kept is not made again.
            ledger.commit([packed(key, (time.monotonic_ns() % 10**6) / 10**6)])
            print(number, flush=True)
            time.sleep(0.01)


if __name__ == "__main__":
    register()
    drive(*sys.argv[1:])
