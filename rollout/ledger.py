"""The run's database: every scheduled forecast ends here once, as a report or as a named failure.

The schedule is written before the first forecast, so that what is missing can always be named. Forecasts come in
batches, each one transaction: what was acknowledged is on disk. A result that arrives twice is one record, and a result
that was never scheduled is refused. Nothing is ever deleted: a record that `retry` takes back stays, marked as
superseded, and its key is open again.
"""

import contextlib
import datetime as dt
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from cluster.clock import Clock, utc_now
from cluster.failures import DataError, FailureKind
from cluster.lock import try_lock
from rollout.changes import Change, Committed, Retried, Superseded
from rollout.ledger_file import IS_KEY, KEY, SCHEMA, SCHEMA_VERSION, committed, connect, key_of, row_of
from rollout.notebook import NotebookState
from rollout.packed import PackedForecast, unpack_trajectory
from rollout.record import ForecastKey, ForecastRecord
from rollout.trajectory import Trajectory


class Ledger:
    """One SQLite file with a single writer, who is enforced. Readers may open it while the run goes on.

    Used by one thread at a time.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._writer: IO[bytes] | None = None
        self.path = path

    @classmethod
    def create(cls, path: Path, schedule: Iterable[ForecastKey], clock: Clock = utc_now) -> Self:
        """A new ledger that expects every key of `schedule`. Raises DataError if a key stands twice."""
        connection = connect(path)
        keys = (row_of(key) for key in schedule)
        try:
            with connection:
                connection.executescript("BEGIN;" + SCHEMA)
                connection.executemany(f"INSERT INTO scheduled ({KEY}) VALUES (?, ?, ?, ?, ?)", keys)
        except sqlite3.IntegrityError as error:
            connection.close()
            raise DataError(f"ledger {path}: the schedule holds a forecast twice ({error})") from error
        return cls(connection, path, clock)

    @classmethod
    def open(cls, path: Path, clock: Clock = utc_now) -> Self:
        """An existing ledger, to read, or to write from the first `commit` or `retry` on.

        Raises DataError if it is missing or of another version.
        """
        if not path.is_file():
            raise DataError(f"ledger {path} does not exist; is its folder a run directory?")
        try:
            connection = connect(path)
            (version,) = connection.execute("SELECT number FROM version").fetchone()
        except sqlite3.DatabaseError as error:
            raise DataError(f"ledger {path} cannot be read: {error}") from error
        if version != SCHEMA_VERSION:
            connection.close()
            raise DataError(
                f"ledger {path} has version {version} and this code reads {SCHEMA_VERSION}; read it with the code that "
                "wrote it (the manifest names it), or make the run again in another directory"
            )
        return cls(connection, path, clock)

    def commit(self, forecasts: Sequence[PackedForecast]) -> list[bool]:
        """Store finished forecasts in one transaction; what it returns is on disk.

        False for a forecast whose key is stored already: the first one stays. Raises DataError, and stores none of
        them, if a key was never scheduled, if another process writes this ledger, or if the disk refuses.
        """
        self._claim()
        added = []
        try:
            with self._connection:
                self._begin()
                change = self.last_change()
                at = self._clock()
                for forecast in forecasts:
                    new = self._insert(Committed.of(forecast, change + 1, at))
                    change += new
                    added.append(new)
        except sqlite3.OperationalError as error:
            raise DataError(f"ledger {self.path} could not be written: {error}; free its disk and resume") from error
        return added

    def retry(self, kinds: Collection[FailureKind], why: str) -> Retried:
        """Take back every record that is a failure of one of `kinds`, so that its forecast is open again.

        Later memory-on steps of the same (model, event, rollout) are taken back as well. The records stay in the
        ledger, with the time and `why`.
        """
        self._claim()
        with self._connection:
            self._begin()
            marks = ", ".join("?" * len(kinds))
            failed = self._connection.execute(
                f"SELECT forecast, reason, {KEY} FROM current JOIN forecasts ON change = forecast "
                f"JOIN scheduled ON scheduled.position = current.position WHERE kind IN ({marks})",
                sorted(kinds),
            ).fetchall()
            reasons = Counter(row[1] for row in failed)
            taken = {row[0] for row in failed}
            later = set()
            for _, _, *key in failed:
                model, event, date, mode, rollout = key
                if mode == "memory-on":
                    rows = self._connection.execute(
                        "SELECT forecast FROM current JOIN scheduled USING (position) "
                        "WHERE model = ? AND event = ? AND mode = ? AND rollout = ? AND date > ?",
                        (model, event, mode, rollout, date),
                    )
                    later |= {row[0] for row in rows} - taken
            at, change = self._clock(), self.last_change()
            for number, forecast in enumerate(sorted(taken | later), change + 1):
                self._supersede(Superseded(change=number, forecast=forecast, at=at, why=why))
        return Retried(failures=dict(sorted(reasons.items())), later_steps=len(later))

    def replay(self, changes: Iterable[Change]) -> None:
        """Apply changes that another ledger of the same schedule recorded, with their numbers and times, in one transaction.

        Raises DataError if they do not follow on what this ledger holds.
        """
        self._claim()
        with self._connection:
            self._begin()
            for change in changes:
                if change.change <= self.last_change():
                    raise DataError(f"ledger {self.path}: change {change.change} is here already")
                if isinstance(change, Superseded):
                    self._supersede(change)
                elif not self._insert(change):
                    raise DataError(f"ledger {self.path}: {change.key} has a record that was not taken back")

    def changes(self, after: int, limit: int, limit_bytes: int = 1 << 62) -> list[Change]:
        """The changes that follow the one numbered `after` (0: from the first), in order.

        At most `limit`, and no more once their records and trajectories exceed `limit_bytes`. None is left out, whatever is
        written meanwhile.
        """
        with self._at_one_moment():
            return self._changes(after, limit, limit_bytes)

    def _changes(self, after: int, limit: int, limit_bytes: int) -> list[Change]:
        gone = self._connection.execute(
            "SELECT change, forecast, at, why FROM superseded WHERE change > ? ORDER BY change LIMIT ?", (after, limit)
        )
        found: list[Change] = [
            Superseded(change=n, forecast=f, at=dt.datetime.fromisoformat(at), why=why) for n, f, at, why in gone
        ]
        rows = self._connection.execute(
            f"SELECT {KEY}, forecasts.change, committed, kind, reason, notebook, output_tokens, price, record, trajectory "
            "FROM forecasts JOIN contents USING (change) JOIN scheduled USING (position) "
            "WHERE forecasts.change > ? ORDER BY forecasts.change LIMIT ?",
            (after, limit),
        )
        size = 0
        for row in rows:
            new = committed(row)
            found.append(new)
            size += len(new.record) + len(new.trajectory or b"")
            if size > limit_bytes:
                # Later changes would leave a gap.
                found = [c for c in found if c.change <= new.change]
                break
        rows.close()
        return sorted(found, key=lambda c: c.change)[:limit]

    def last_change(self) -> int:
        """The number of the newest change; 0 when nothing has happened."""
        (number,) = self._connection.execute(
            "SELECT max(ifnull((SELECT max(change) FROM forecasts), 0), ifnull((SELECT max(change) FROM superseded), 0))"
        ).fetchone()
        return int(number)

    def scheduled(self) -> Iterator[ForecastKey]:
        """Every forecast that is expected, in scheduled order; one at a time is in memory."""
        return map(key_of, self._connection.execute(f"SELECT {KEY} FROM scheduled ORDER BY position"))

    def counts(self) -> tuple[int, int]:
        """(scheduled, finished)."""
        row = self._connection.execute("SELECT (SELECT count(*) FROM scheduled), (SELECT count(*) FROM current)")
        scheduled, finished = row.fetchone()
        return scheduled, finished

    def finished(self) -> set[ForecastKey]:
        """The keys that have a record."""
        return {
            key_of(row)
            for row in self._connection.execute(f"SELECT {KEY} FROM current JOIN scheduled USING (position)")
        }

    def holds(self, key: ForecastKey) -> bool:
        """Whether a forecast has a record; nothing of it is read."""
        return (
            self._connection.execute(
                f"SELECT 1 FROM scheduled JOIN current USING (position) WHERE {IS_KEY}", row_of(key)
            ).fetchone()
            is not None
        )

    def notebook(self, key: ForecastKey) -> NotebookState | None:
        """The notebook that a finished forecast left, without its record. Raises KeyError for one that has none."""
        row = self._connection.execute(
            "SELECT notebook FROM scheduled JOIN current USING (position) JOIN forecasts ON change = forecast "
            f"WHERE {IS_KEY}",
            row_of(key),
        ).fetchone()
        if row is None:
            raise KeyError(key)
        return None if row[0] is None else NotebookState.model_validate_json(row[0])

    def records(self) -> Iterator[ForecastRecord]:
        """All records in scheduled order, those that were taken back left out."""
        rows = self._connection.execute(
            "SELECT record FROM current JOIN contents ON change = forecast ORDER BY position"
        )
        for (text,) in rows:
            yield ForecastRecord.model_validate_json(text)

    def forecasts(self) -> Iterator[tuple[ForecastRecord, Trajectory | None]]:
        """Every record with its trajectory, in scheduled order; one at a time is in memory."""
        rows = self._connection.execute(
            "SELECT record, trajectory FROM current JOIN contents ON change = forecast ORDER BY position"
        )
        for text, packed in rows:
            trajectory = None if packed is None else unpack_trajectory(packed)
            yield ForecastRecord.model_validate_json(text), trajectory

    def trajectory(self, key: ForecastKey) -> Trajectory | None:
        """The trajectory of one key; None when the forecast is missing or left none."""
        row = self._connection.execute(
            "SELECT trajectory FROM scheduled JOIN current USING (position) JOIN contents ON change = forecast "
            f"WHERE {IS_KEY}",
            row_of(key),
        ).fetchone()
        return None if row is None or row[0] is None else unpack_trajectory(row[0])

    def kinds(self) -> dict[FailureKind, int]:
        """Number of records by the kind of their failure, those without one left out."""
        rows = self._connection.execute(
            "SELECT kind, count(*) FROM current JOIN forecasts ON change = forecast WHERE kind IS NOT NULL GROUP BY kind"
        )
        return dict(rows.fetchall())

    def failures(self) -> dict[str, int]:
        """Number of records by failure reason."""
        rows = self._connection.execute(
            "SELECT reason, count(*) FROM current JOIN forecasts ON change = forecast "
            "WHERE reason IS NOT NULL GROUP BY reason ORDER BY reason"
        )
        return dict(rows.fetchall())

    def spent(self) -> tuple[int, float]:
        """(sampled tokens, US dollars) of all that was ever recorded, also of what was taken back: it was paid for."""
        tokens, price = self._connection.execute("SELECT total(output_tokens), total(price) FROM forecasts").fetchone()
        return int(tokens), price

    def close(self) -> None:
        """Close the file; committed records are on disk already."""
        self._connection.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _claim(self) -> None:
        """Be the one writer from now on. Raises DataError if there is another."""
        if self._writer is not None or str(self.path) == ":memory:":
            return
        # A file of its own: closing a second handle on the database would drop SQLite's own locks.
        handle = self.path.with_name(f"{self.path.name}.writer").open("wb")
        with contextlib.ExitStack() as stack:
            stack.enter_context(handle)
            if not try_lock(handle):
                raise DataError(f"ledger {self.path} has another writer; end it, or wait for it")
            stack.pop_all()
        self._writer = handle

    @contextlib.contextmanager
    def _at_one_moment(self) -> Iterator[None]:
        """Several questions see the ledger as it was at the first of them."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("COMMIT")

    def _begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def _insert(self, new: Committed) -> bool:
        position = self._position(new.key)
        if self._connection.execute("SELECT 1 FROM current WHERE position = ?", (position,)).fetchone():
            return False
        self._connection.execute(
            "INSERT INTO forecasts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                new.change,
                position,
                new.at.isoformat(),
                new.kind,
                new.reason,
                new.notebook,
                new.output_tokens,
                new.price,
            ),
        )
        self._connection.execute("INSERT INTO contents VALUES (?, ?, ?)", (new.change, new.record, new.trajectory))
        self._connection.execute("INSERT INTO current VALUES (?, ?)", (position, new.change))
        return True

    def _supersede(self, change: Superseded) -> None:
        if not self._connection.execute("DELETE FROM current WHERE forecast = ?", (change.forecast,)).rowcount:
            raise DataError(f"ledger {self.path}: change {change.forecast} is no record that could be taken back")
        self._connection.execute(
            "INSERT INTO superseded VALUES (?, ?, ?, ?)",
            (change.change, change.forecast, change.at.isoformat(), change.why),
        )

    def _position(self, key: ForecastKey) -> int:
        row = self._connection.execute(f"SELECT position FROM scheduled WHERE {IS_KEY}", row_of(key)).fetchone()
        if row is None:
            raise DataError(f"ledger {self.path}: {key} was never scheduled")
        return int(row[0])
