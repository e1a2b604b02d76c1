"""The disk under the ledger: a real SQLite file, and what a crash leaves of it.

A killed writer leaves the file and the log as they are. In the worst case the last write is torn anywhere, for only what
the writer was told is stored has been forced to the disk. A disk that is full or locked refuses like a real one.
"""

import datetime as dt
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.clock import Clock
from cluster.failures import FailureKind
from rollout.changes import Change
from rollout.ledger import Ledger
from rollout.packed import PackedForecast
from rollout.record import ForecastKey, ForecastRecord
from rollout.simulator.clock import Broken, Killed
from rollout.simulator.faults import Faults

BEGAN = dt.datetime(2040, 1, 1, tzinfo=dt.UTC)
"""The wall clock at virtual second 0."""


def wall_clock(seconds: Callable[[], float]) -> Clock:
    """A wall clock over the virtual one."""
    return lambda: BEGAN + dt.timedelta(seconds=seconds())


Store = Callable[[Sequence[PackedForecast]], list[bool]]


class DiskLedger(Ledger):
    """The real ledger on a simulated disk."""

    disk: "SimulatedDisk"

    def commit(self, forecasts: Sequence[PackedForecast]) -> list[bool]:
        """As the real one, if the disk lets it."""
        return self.disk.commit(self, super().commit, forecasts)


class SimulatedDisk:
    """Holds one ledger over all lives of its driver."""

    def __init__(self, folder: Path, faults: Faults, clock: Clock) -> None:
        self._file = folder / "ledger.sqlite"
        self._faults = faults
        self._clock = clock
        self._open: DiskLedger | None = None
        self._schedule: Sequence[ForecastKey] = ()
        self.acknowledged: dict[ForecastKey, str] = {}
        """Record by key, of every commit that returned: this must survive whatever happens."""

    def create(self, schedule: Sequence[ForecastKey]) -> None:
        """A new ledger."""
        self._schedule = schedule
        Ledger.create(self._file, schedule, self._clock).close()

    def open(self) -> Ledger:
        """The ledger, for a new life of the driver."""
        self._open = DiskLedger.open(self._file, self._clock)
        self._open.disk = self
        # A locked database refuses at once: the real time-out is the disk's matter, and our clock does not wait for it.
        connect(self._open).execute("PRAGMA busy_timeout = 0")
        return self._open

    def commit(self, ledger: Ledger, store: Store, forecasts: Sequence[PackedForecast]) -> list[bool]:
        """`store` on this disk. Raises its DataError, and Killed where the process dies of it."""
        assert ledger is self._open, "a life that has ended writes to the ledger"
        keys = ", ".join(short(f.key) for f in forecasts)
        if self._faults.strikes("killed-before-commit", keys):
            raise Killed("the driver is killed before a commit")
        if self._faults.strikes("killed-in-commit", keys):
            self._tear(ledger, store, forecasts)
            raise Killed("the driver is killed within a commit")
        added = self._refused(ledger, store, forecasts) or store(forecasts)
        for forecast, new in zip(forecasts, added, strict=True):
            if new:
                self.acknowledged[forecast.key] = forecast.record
        if self._faults.strikes("killed-after-commit", keys):
            raise Killed("the driver is killed after a commit")
        return added

    def retry(self, ledger: Ledger, kinds: frozenset[FailureKind]) -> int:
        """`Ledger.retry`: how many forecasts are open again."""
        opened = ledger.retry(kinds, "asked for").total
        finished = ledger.finished()
        for key in [k for k in self.acknowledged if k not in finished]:
            del self.acknowledged[key]
        return opened

    def lose(self, parts: Sequence[Sequence[Change]], shipped_to: int) -> None:
        """The disk is gone with all it held, and a new one is laid from a mirror. Raises Broken if what was shipped is not there."""
        for file in self._file.parent.glob(f"{self._file.name}*"):
            file.unlink()
        with Ledger.create(self._file, self._schedule, self._clock) as ledger:
            for changes in parts:
                ledger.replay(changes)
            if ledger.last_change() < shipped_to:
                raise Broken(f"the mirror holds {ledger.last_change()} changes, {shipped_to} were shipped")
            held = {record.key: record for record in ledger.records()}
        for key, text in list(self.acknowledged.items()):
            if key not in held:
                del self.acknowledged[key]
            elif held[key] != ForecastRecord.model_validate_json(text):
                raise Broken(f"the mirror holds another record of {short(key)}")

    def crash(self) -> None:
        """The process that wrote is gone, and with it whatever it had not committed."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def read(self) -> Ledger:
        """The ledger, to check it."""
        return Ledger.open(self._file, self._clock)

    def _refused(self, ledger: Ledger, store: Store, forecasts: Sequence[PackedForecast]) -> list[bool] | None:
        """Let the disk refuse, if a fault says so; raises the ledger's own error."""
        if self._faults.strikes("disk-full"):
            connection = connect(ledger)
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {pages}")
            try:
                # A small record may still fit into the last pages.
                return store(forecasts)
            finally:
                connection.execute("PRAGMA max_page_count = 1000000")
        if self._faults.strikes("disk-locked"):
            other = sqlite3.connect(self._file, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            try:
                return store(forecasts)
            finally:
                other.close()
        return None

    def _tear(self, ledger: Ledger, store: Store, forecasts: Sequence[PackedForecast]) -> None:
        """Commit, then take back a part of what was written since: the log ends anywhere behind what was forced to disk."""
        log = self._file.with_name(f"{self._file.name}-wal")
        before = log.stat().st_size if log.exists() else 0
        store(forecasts)
        torn = self._file.with_name("torn")
        torn.mkdir()
        for file in (self._file, log):
            shutil.copy(file, torn / file.name)
        ledger.close()
        self._open = None
        chance = self._faults.stream("torn")
        copy = torn / log.name
        written = copy.stat().st_size
        if written > before:
            with copy.open("r+b") as handle:
                handle.truncate(chance.randint(before, written))
                if chance.random() < 0.5:
                    handle.seek(0, 2)
                    handle.write(chance.randbytes(chance.randint(1, 5000)))
        for file in (self._file, log):
            shutil.move(torn / file.name, file)
        torn.rmdir()
        self._file.with_name(f"{self._file.name}-shm").unlink(missing_ok=True)


def connect(ledger: Ledger) -> sqlite3.Connection:
    """The ledger's own connection: the disk lies beneath it."""
    return ledger._connection


def short(key: ForecastKey) -> str:
    """A key in few characters."""
    return f"{key.event}/{key.date:%m-%d}/{key.mode}/{key.rollout}"
