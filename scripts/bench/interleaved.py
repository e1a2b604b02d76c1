"""Methods measured in turns: each in a process of its own that runs alone, one after the other, round after round."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from cluster.record import Record
from scripts.bench.floor import Floor

ROOFLINE = "roofline"
"""Stands for measuring the machine instead of a method."""

Found = list[list[int]]
"""Rows per query, best first."""


class Run(Record):
    """One search of the whole batch."""

    ms: float
    """Wall time; the median where a search is so short that it was repeated."""
    cpu_ms: float
    """Processor time of all threads."""
    found: Found
    own_mib: float = 0.0
    """Memory that only this process has."""
    mapped_mib: float = 0.0
    """Pages of files that it touched; every process that maps the file shares them."""


class Measured(Record):
    """All rounds."""

    floors: tuple[Floor, ...]
    """What the machine could do in every round."""
    runs: dict[str, tuple[Run, ...]]
    """Name → its run in every round."""
    elsewhere: float
    """Share of the machine's processor time that other processes took, or the host of a virtual machine."""


class Child:
    """A method in its own process (`bench_methods`)."""

    def __init__(self, folder: Path, method: str, k: int) -> None:
        command = [sys.executable, "-m", "scripts.bench_methods", str(folder), method, str(k)]
        quiet = {**os.environ, "LANCE_LOG": "error"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError(f"{method} has no pipes")
        self._input, self._output = self._process.stdin, self._process.stdout
        if self._output.readline() != "ready\n":
            raise RuntimeError(f"{method} did not start; what it said stands above")

    def run(self) -> str:
        """One more measurement, as JSON."""
        self._input.write("go\n")
        self._input.flush()
        return self._output.readline()

    def close(self) -> None:
        """Ends the process: it leaves when its input does."""
        self._input.close()
        self._process.wait()


def measure(children: dict[str, tuple[Path, str]], rounds: int, k: int) -> Measured:
    """`children`: name → (folder of its data, method). The machine's own speed is measured first in every round."""
    began, before = time.perf_counter(), _busy_seconds()
    started = {name: Child(folder, method, k) for name, (folder, method) in children.items()}
    anywhere = next(iter(children.values()))[0]
    roofline = Child(anywhere, ROOFLINE, k)
    floors: list[Floor] = []
    runs: dict[str, list[Run]] = {name: [] for name in children}
    try:
        for _ in range(rounds):
            floors.append(Floor.model_validate_json(roofline.run()))
            for name, child in started.items():
                runs[name].append(Run.model_validate_json(child.run()))
    finally:
        for child in (roofline, *started.values()):
            child.close()
    others = _busy_seconds() - before
    share = others / ((time.perf_counter() - began) * (psutil.cpu_count() or 1))
    return Measured(
        floors=tuple(floors), runs={name: tuple(made) for name, made in runs.items()}, elsewhere=max(0.0, share)
    )


def _busy_seconds() -> float:
    """Processor seconds of everything except this process and the children that it has waited for."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    own: Sequence[resource.struct_rusage] = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return float(sum(times) - idle - sum(usage.ru_utime + usage.ru_stime for usage in own))
