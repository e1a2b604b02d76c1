"""What a run says of itself while it goes on, for another terminal: written by the driver each second, read by anyone.

`status.json` is replaced whole and never waited for. What it says may be old: a driver that was killed cannot say so.
So a reader also looks at the lock, which a living driver holds, and at the ledger, which is the truth about records
and is read wherever no other machine writes it.
"""

import datetime as dt
import logging
import os
import platform
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from cluster.clock import Clock, monotonic, utc_now
from cluster.failures import DataError
from cluster.log_limit import LogLimit
from cluster.pool_view import EngineView, PoolView
from cluster.record import Record
from rollout.mirror import SCHEDULE_FILE, Mirror, MirrorState, read_index, read_parts, read_start_file
from rollout.mirror_store import MirrorStore
from rollout.progress import Progress
from rollout.run import STATUS_FILE, RunDirectory

logger = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
RATE_SECONDS = 300.0
"""The rate is that of the last this many seconds: a run's beginning says little about its end."""


class RunStatus(Record):
    """A run at one moment, as its driver sees it."""

    run: str
    """Its directory, on the driver's machine."""
    fingerprint: str
    host: str
    pid: int
    began: dt.datetime
    """When this sitting began."""
    updated: dt.datetime
    stage: str
    ended: str
    """Why the driver ended; empty while it works."""
    scheduled: int
    done: int
    done_now: int
    """Of `done`, in this sitting."""
    running: int
    per_second: float
    """Forecasts a second, over the last minutes."""
    expected_end: dt.datetime | None
    """At that rate; None while there is none, and at the end."""
    failures: dict[str, int]
    """Records by failure reason."""
    retried: int
    """Attempts of this sitting that infrastructure failed and that were queued again."""
    output_tokens: int
    """Sampled in this sitting."""
    tokens_per_second: float
    price: float
    """US dollars, of earlier sittings too."""
    engines: tuple[EngineView, ...]
    limit: int | None
    """Steps that the engine pool takes at once now; None without engines of our own."""
    paused: str
    """Why the pool takes no new step; empty while it does."""
    mirror: MirrorState | None
    metrics: str
    """Where the driver's node serves the metrics of this run; empty while there is no Ray session."""


class Rate:
    """Forecasts and tokens a second over a moving window: a pure class over seconds and sums."""

    def __init__(self, window_s: float = RATE_SECONDS) -> None:
        self._window = window_s
        self._points: deque[tuple[float, int, int]] = deque()

    def add(self, now: float, done: int, tokens: int) -> None:
        """Both sums only grow."""
        if self._points and now - self._points[-1][0] < self._window / 300:
            return
        self._points.append((now, done, tokens))
        while len(self._points) > 2 and self._points[1][0] <= now - self._window:
            self._points.popleft()

    def per_second(self, now: float, done: int, tokens: int) -> tuple[float, float]:
        """(forecasts, tokens) since the window's beginning; zero before there is one."""
        if not self._points or now <= self._points[0][0]:
            return 0.0, 0.0
        began, done_then, tokens_then = self._points[0]
        return (done - done_then) / (now - began), (tokens - tokens_then) / (now - began)


class StatusWriter:
    """The driver's side. `tell` may be called as often as one likes; an error that leaves its context is its last word."""

    def __init__(
        self,
        run: RunDirectory,
        mirror: Mirror | None = None,
        clock: Clock = utc_now,
        seconds: Callable[[], float] = monotonic,
        publish: Callable[[RunStatus], None] = lambda _: None,
    ) -> None:
        """`publish` gets every status that is written."""
        self._run, self._mirror, self._clock, self._seconds = run, mirror, clock, seconds
        self._fingerprint = run.manifest().fingerprint
        self._began = clock()
        self._rate = Rate()
        self._written = float("-inf")
        self._last: tuple[Progress, PoolView | None] | None = None
        self._said: RunStatus | None = None
        self._publish = publish
        self._metrics = ""
        self._log = LogLimit(logger, clock=seconds)

    def measure(self, publish: Callable[[RunStatus], None], address: str) -> None:
        """From now on every status also becomes metrics, which are served at `address`."""
        self._publish, self._metrics = publish, address

    def tell(self, progress: Progress, pool: PoolView | None) -> None:
        """The run's state now; written if the last one is older than a second."""
        now = self._seconds()
        self._rate.add(now, progress.done_now, progress.output_tokens)
        self._last = progress, pool
        if now - self._written >= WRITE_SECONDS:
            self._written = now
            self._write(progress, pool, ended="")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(f"{type(error).__name__}: {error}".strip(": "))

    def end(self, why: str) -> None:
        """The driver's last word, if it has said one before."""
        if self._last is not None:
            self._write(*self._last, ended=why)

    def settle(self) -> None:
        """The mirror is closed: say in the run how far it came. The mirror itself holds the last word before."""
        if self._said is not None and self._mirror is not None:
            self._store(self._said.model_copy(update={"mirror": self._mirror.state()}).model_dump_json(indent=1))

    def _write(self, progress: Progress, pool: PoolView | None, ended: str) -> None:
        now = self._clock()
        rate, tokens = self._rate.per_second(self._seconds(), progress.done_now, progress.output_tokens)
        left = progress.total - progress.done
        end = now + dt.timedelta(seconds=left / rate) if rate > 0 and left and not ended else None
        status = RunStatus(
            run=str(self._run.path.resolve()),
            fingerprint=self._fingerprint,
            host=platform.node(),
            pid=os.getpid(),
            began=self._began,
            updated=now,
            stage=progress.stage,
            ended=ended,
            scheduled=progress.total,
            done=progress.done,
            done_now=progress.done_now,
            running=0 if ended else progress.running,
            per_second=rate,
            expected_end=end,
            failures=progress.failures,
            retried=progress.retried,
            output_tokens=progress.output_tokens,
            tokens_per_second=tokens,
            price=progress.price,
            engines=pool.engines if pool and not ended else (),
            limit=pool.limit if pool and pool.engines else None,
            paused=pool.paused if pool else "",
            mirror=self._mirror.state() if self._mirror else None,
            metrics="" if ended else self._metrics,
        )
        self._said = status
        text = status.model_dump_json(indent=1)
        self._store(text)
        if self._mirror is not None:
            self._mirror.note(text)
        self._publish(status)

    def _store(self, text: str) -> None:
        try:
            self._run.write_status(text)
        except OSError as error:
            # The ledger is the truth, and has its own say about the disk: no forecast is lost for a status.
            self._log.error("status-not-written", "%s could not be written: %s", self._run.path / STATUS_FILE, error)


class StatusReport(Record):
    """What can be known of a run from outside."""

    run: str
    """A directory or a mirror's address."""
    status: RunStatus | None
    """The driver's last word; None if there is none yet."""
    age_s: float | None
    """Seconds since it was said."""
    driver: bool | None
    """Whether a process works in the run; None where it cannot be known (a mirror)."""
    scheduled: int
    done: int | None
    """Records in the ledger; of a mirror, and of a run on another machine, what its driver said last, None if nothing."""
    failures: dict[str, int]
    parts: int | None
    """Of a mirror: how many there are; None for a directory."""
    shipped: int | None
    """Of a mirror: the last change it holds."""

    @property
    def verdict(self) -> str:
        """In one sentence: does it go on, and what is to be done if not."""
        said = self.status
        ago = "" if self.age_s is None else f", last heard of {duration(self.age_s)} ago"
        if self.done == self.scheduled and not self.driver:
            return "complete: every scheduled forecast has its record"
        if self.driver:
            where = f" on {said.host}, process {said.pid}" if said and not said.ended else ""
            return f"a driver works on it{where}{ago}"
        if said is None:
            return "no driver works on it, and none has said anything yet"
        if said.ended:
            return f"its driver ended ({said.ended}){ago}; go on with --resume"
        if self.driver is None:
            return f"its driver works or was killed{ago}: a mirror cannot know"
        return f"its driver is gone without a word{ago}: it was killed; go on with --resume"


def read_status(run: str, clock: Clock = utc_now) -> StatusReport:
    """The status of a run by its directory or its mirror's address.

    Raises DataError if there is no run, MirrorUnreachable if the mirror does not answer.
    """
    return _of_mirror(run, clock) if "://" in run else _of_directory(RunDirectory(Path(run)), clock)


def _of_directory(run: RunDirectory, clock: Clock) -> StatusReport:
    run.manifest()
    driver = run.in_use()
    file = run.path / STATUS_FILE
    status = _parsed(file.read_bytes(), str(file)) if file.is_file() else None
    if driver and status is not None and not status.ended and status.host != platform.node():
        # SQLite's log is not shared between machines: a ledger that is written on another one may be read wrongly.
        scheduled, done, failures = status.scheduled, status.done, status.failures
    else:
        with run.ledger() as ledger:
            scheduled, done = ledger.counts()
            failures = ledger.failures()
    return StatusReport(
        run=str(run.path),
        status=status,
        age_s=_age(status, clock),
        driver=driver,
        scheduled=scheduled,
        done=done,
        failures=failures,
        parts=None,
        shipped=None,
    )


def _of_mirror(address: str, clock: Clock) -> StatusReport:
    store = MirrorStore(address)
    index = read_index(store)
    if index is None:
        raise DataError(f"mirror {store.address} holds no run; is this the address of run.mirror?")
    parts = read_parts(store)
    there = STATUS_FILE in store.names("")
    status = _parsed(store.get(STATUS_FILE), f"{store.address}/{STATUS_FILE}") if there else None
    return StatusReport(
        run=store.address,
        status=status,
        age_s=_age(status, clock),
        driver=None,
        scheduled=status.scheduled if status else len(read_start_file(store, index, SCHEDULE_FILE).splitlines()),
        done=status.done if status else None,
        failures=status.failures if status else {},
        parts=len(parts),
        shipped=parts[-1].last if parts else 0,
    )


def _parsed(content: bytes, where: str) -> RunStatus:
    try:
        return RunStatus.model_validate_json(content)
    except ValidationError as error:
        # In a mirror it is overwritten in place, and may be seen half-way.
        raise DataError(f"{where} is not a status this code reads; ask again, or read it as JSON") from error


def _age(status: RunStatus | None, clock: Clock) -> float | None:
    return None if status is None else max(0.0, (clock() - status.updated).total_seconds())


def duration(seconds: float) -> str:
    """As a person says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"
