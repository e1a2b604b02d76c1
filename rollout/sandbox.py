"""The Python tool's cell: code of a model in a fresh interpreter, and its output.

Each run is a new process that keeps nothing: no network, no file of ours, limited memory, processors, processes, file
sizes, output and time, and a clock that starts at noon UTC of the forecast date. Where the machine cannot build such
a cell, a weaker one is used and `describe` says what is weaker; nothing is weakened silently. What the code does wrong
is a `CellResult`; a cell that could not be started is an InfrastructureError.
"""

import asyncio
import codecs
import contextlib
import datetime as dt
import itertools
import logging
import math
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Literal

from cluster.config import PythonSettings
from cluster.failures import InfrastructureError, SettingsError
from cluster.record import Record
from rollout import cell
from rollout.enclosure import Enclosure, Launch, Runtime, find_runtime, launch, noon

_log = logging.getLogger(__name__)

_FLOOD_CHARACTERS = 16 * 2**20
"""A cell that has printed this much is stopped: nobody reads it, and reading costs us."""
_PROCESSES = 32
"""Processes and threads of one cell."""
_FILE_BYTES = 32 * 2**20
_PROBE_DAY = dt.date(2001, 2, 3)
_PROBE_SECONDS = 30.0
_CELL = Path(cell.__file__)
_uids = itertools.cycle(range(60_000, 65_000))
"""Users that nobody is, one a cell: the limit on processes counts by user."""


class CellResult(Record):
    """What a run of the code left behind."""

    stdout: str
    """Standard output with the echoed last expression, from its beginning, bounded."""
    error: str
    """Standard error (warnings, a traceback), its end, bounded."""
    exit_status: int
    """0 success, 1 an uncaught exception, 128 + n killed by signal n."""
    timed_out: bool = False
    flooded: bool = False
    """Stopped because it printed without end."""
    seconds: float
    """Wall-clock seconds, the start of the interpreter included."""
    cut: int = 0
    """Characters of both outputs that were left out."""


class Sandbox:
    """Runs code in cells, at most `settings.parallel` at once.

    Raises SettingsError when `isolation: bubblewrap` is asked for and does not work here.
    """

    def __init__(self, settings: PythonSettings) -> None:
        self._settings = settings
        self._runtime = find_runtime()
        self._enclosure = choose_enclosure(settings.isolation)
        # Threads of its own: they only wait for cells, and whoever else uses the loop's threads is not kept waiting by them.
        self._threads = ThreadPoolExecutor(settings.parallel, thread_name_prefix="cell")
        if self._enclosure.kind != "bubblewrap" or self.clock != "libfaketime":
            _log.warning("Python tool: %s", self.describe())

    @property
    def isolation(self) -> Literal["bubblewrap", "namespaces", "process"]:
        """The walls in force."""
        return self._enclosure.kind

    @property
    def clock(self) -> Literal["libfaketime", "patched"]:
        """What makes the clock say the forecast date."""
        return "patched" if self._runtime.faketime is None else "libfaketime"

    def weaknesses(self) -> tuple[str, ...]:
        """What code in this cell could still do or learn."""
        found = [
            "a direct system call shows the true time; package versions, file times and the kernel's name hint at it"
        ]
        if self.clock == "patched":
            found.append("only Python's time and datetime say the forecast date, pandas and numpy do not")
        if self.isolation != "bubblewrap":
            found.append("it can read and write every file that this user can")
        if self.isolation == "process":
            found.append("it can reach the network, and a child in a session of its own outlives the time-out")
        found.append("memory is bounded per process, not per cell")
        return tuple(found)

    def describe(self) -> str:
        """Walls, clock and weaknesses in one line, for the manifest and for people."""
        advice = "" if self.isolation == "bubblewrap" else " (install bubblewrap for real walls)"
        if self.clock == "patched":
            advice += " (install libfaketime for a real clock)"
        return f"isolation {self.isolation}, clock {self.clock}{advice}; weak points: {'; '.join(self.weaknesses())}"

    async def run(self, code: str, today: dt.date) -> CellResult:
        """Runs the code on that day. Raises InfrastructureError when the cell itself does not start."""
        run = _Run(self._enclosure, self._runtime, self._settings, code, today)
        waiting = self._threads.submit(run.complete)
        try:
            return await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            run.kill()
            # Whoever cancelled may go on only when nothing of the cell is left.
            await asyncio.gather(asyncio.wrap_future(waiting), return_exceptions=True)
            raise


@cache
def choose_enclosure(isolation: Literal["auto", "bubblewrap", "process"]) -> Enclosure:
    """The strongest enclosure of that setting that passes a probe here. Raises SettingsError for `bubblewrap` in vain."""
    candidates = [Enclosure(kind="bubblewrap", drop_root=True)] if os.geteuid() == 0 else []
    candidates.append(Enclosure(kind="bubblewrap"))
    if isolation == "process":
        candidates = []
    if isolation != "bubblewrap":
        candidates += [Enclosure(kind="namespaces"), Enclosure(kind="process")]
    reasons = []
    for candidate in candidates:
        reason = _fault(candidate)
        if reason is None:
            return candidate
        reasons.append(f"{candidate.kind}: {reason}")
    raise SettingsError(
        f"rollout.python.isolation is {isolation}, but no such cell works on this machine ({'; '.join(reasons)}); "
        "install bubblewrap, allow user namespaces, or set it to auto"
    )


def _fault(enclosure: Enclosure) -> str | None:
    """Why this enclosure does not work here; None when it does."""
    code = "import datetime\nprint(datetime.datetime.now().date(), sum(range(10)))"
    settings = PythonSettings(timeout_s=_PROBE_SECONDS)
    try:
        result = _Run(enclosure, find_runtime(), settings, code, _PROBE_DAY).complete()
    except (InfrastructureError, FileNotFoundError) as error:
        return str(error)
    if result.stdout.split() != [str(_PROBE_DAY), "45"]:
        return f"the probe printed {result.stdout!r} {result.error!r}"
    return None


class _Run:
    """One process group from start to end, driven by one thread; `kill` may be called from another."""

    def __init__(
        self, enclosure: Enclosure, runtime: Runtime, settings: PythonSettings, code: str, today: dt.date
    ) -> None:
        self._enclosure = enclosure
        self._runtime = runtime
        self._settings = settings
        self._code = code.encode("utf-8", "surrogatepass")
        self._today = today
        self._lock = threading.Lock()
        self._killed = False
        self._process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """Ends the process and everything it started; before the start, prevents it."""
        with self._lock:
            self._killed = True
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def complete(self) -> CellResult:
        """Starts the cell, feeds it, reads it within its bounds, and waits for its end."""
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            scratch = ""
            if self._enclosure.kind != "bubblewrap":
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="cell-", ignore_cleanup_errors=True))
            plan = launch(self._enclosure, self._runtime, _CELL, self._today, scratch)
            process = self._start(plan, scratch, stack)
            stack.callback(self._close, process)
            out = _Kept(self._settings.output_characters, "head")
            err = _Kept(self._settings.output_characters, "tail")
            finished = self._converse(process, started + self._settings.timeout_s, out, err)
            flooded = out.total > _FLOOD_CHARACTERS or err.total > _FLOOD_CHARACTERS
            # Also after a good end: what the code started in the background ends with it.
            self.kill()
            status = process.wait()
        seconds = time.monotonic() - started
        if not out.ready:
            raise InfrastructureError("sandbox", f"the cell did not start (status {status}): {err.text.strip()[-500:]}")
        return CellResult(
            stdout=self._without_our_paths(out.text, scratch),
            error=self._without_our_paths(err.text, scratch),
            exit_status=128 - status if status < 0 else status,
            timed_out=not finished and not flooded,
            flooded=flooded,
            seconds=seconds,
            cut=out.cut + err.cut,
        )

    def _start(self, plan: Launch, scratch: str, stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        descriptors = {placeholder: _in_memory(content, stack) for placeholder, content in plan.files}
        command = [str(descriptors.get(part, part)) for part in plan.command]
        with self._lock:
            if self._killed:
                raise InfrastructureError("sandbox", "cancelled before the cell started")
            try:
                self._process = subprocess.Popen(
                    [*command, self._argument(plan)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=plan.environment,
                    cwd=scratch or "/",
                    pass_fds=tuple(descriptors.values()),
                    start_new_session=True,
                )
            except OSError as error:
                raise InfrastructureError("sandbox", f"cannot start {command[0]}: {error}") from error
            return self._process

    def _argument(self, plan: Launch) -> str:
        limits = {
            "RLIMIT_AS": self._settings.memory_mib * 2**20,
            "RLIMIT_CPU": math.ceil(self._settings.timeout_s) + 1,
            "RLIMIT_FSIZE": _FILE_BYTES,
            "RLIMIT_NOFILE": 128,
            "RLIMIT_CORE": 0,
        }
        if self._enclosure.kind == "bubblewrap":
            # Elsewhere the limit would count every process of this user.
            limits["RLIMIT_NPROC"] = _PROCESSES
        return repr(
            {
                "packages": plan.packages,
                "limits": limits,
                "uid": next(_uids) if self._enclosure.drop_root else None,
                "clock": noon(self._today).timestamp() if self._runtime.faketime is None else None,
            }
        )

    def _converse(self, process: subprocess.Popen[bytes], deadline: float, out: "_Kept", err: "_Kept") -> bool:
        """Feeds and reads until both outputs end and the process with them; False when the deadline came first."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        left = memoryview(self._code)
        with selectors.DefaultSelector() as selector:
            for stream, event in ((process.stdin, selectors.EVENT_WRITE), (process.stdout, selectors.EVENT_READ)):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, event, out)
            selector.register(process.stderr, selectors.EVENT_READ, err)
            while selector.get_map():
                if (remaining := deadline - time.monotonic()) <= 0:
                    return False
                for key, _ in selector.select(remaining):
                    if key.fileobj is process.stdin:
                        left = _feed(process.stdin, left)
                        if not left:
                            selector.unregister(process.stdin)
                            process.stdin.close()
                        continue
                    chunk = os.read(key.fd, 65_536)
                    key.data.add(chunk)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    if key.data.total > _FLOOD_CHARACTERS:
                        return False
        return _ended(process.pid, deadline)

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        """Whatever happened, nothing of the group is left and the pipes are closed."""
        self.kill()
        process.wait()
        if self._enclosure.kind != "bubblewrap":
            # libfaketime leaves these on this machine when its process is killed; a bubblewrap cell has its own.
            for name in (f"sem.faketime_sem_{process.pid}", f"faketime_shm_{process.pid}"):
                Path("/dev/shm", name).unlink(missing_ok=True)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _without_our_paths(self, text: str, scratch: str) -> str:
        if not scratch:
            return text
        for path, shown in self._shown_paths(scratch):
            text = text.replace(path, shown)
        return text

    def _shown_paths(self, scratch: str) -> Iterator[tuple[str, str]]:
        yield scratch, "/tmp"
        yield self._runtime.site, "/packages"
        yield self._runtime.stdlib, f"/python/{self._runtime.stdlib_below_prefix}"
        yield self._runtime.executable, "/python/bin/python3"
        yield str(_CELL), "/cell.py"


class _Kept:
    """The beginning or the end of a byte stream as text, in bounded memory, and how much of it there was."""

    def __init__(self, limit: int, part: Literal["head", "tail"]) -> None:
        self._limit = limit
        self._part = part
        self._decode: Callable[[bytes, bool], str] = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._first = part == "head"
        self.text = ""
        self.total = 0
        self.ready = False
        """Whether the stream began with the cell's sign that it works, which is no part of the text."""

    def add(self, chunk: bytes) -> None:
        """The next bytes; none at the end of the stream."""
        if self._first and chunk:
            self.ready = chunk.startswith(cell.READY)
            chunk = chunk.removeprefix(cell.READY)
            self._first = False
            if not chunk:
                return
        new = self._decode(chunk, not chunk)
        self.total += len(new)
        if self._part == "tail":
            self.text = (self.text + new)[-self._limit :]
        elif len(self.text) < self._limit:
            self.text += new[: self._limit - len(self.text)]

    @property
    def cut(self) -> int:
        """Characters that are not in the text."""
        return self.total - len(self.text)


def _feed(stream: IO[bytes], left: memoryview) -> memoryview:
    """Writes what fits and returns the rest; nothing is left when the other end is gone."""
    if not left:
        return left
    try:
        return left[os.write(stream.fileno(), left[:65_536]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[:0]


def _ended(pid: int, deadline: float) -> bool:
    """Waits for the end of a child; False when the deadline came first. Its status is left to be read: until then its number,
    and that of its group, is nobody else's."""
    pause = 0.0005
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if (remaining := deadline - time.monotonic()) <= 0:
            return False
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, 0.05)
    return True


def _in_memory(content: bytes, stack: contextlib.ExitStack) -> int:
    """A descriptor that reads these bytes, open until the stack closes."""
    descriptor = os.memfd_create("cell")
    stack.callback(os.close, descriptor)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
