"""The run's database: every scheduled forecast ends here once, as a report or as a named failure.

The schedule is written before the first forecast, so that what is missing can always be named. A finished step is one
transaction; a result that arrives twice is one record, and a result that was never scheduled is refused.
"""

import datetime as dt
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.failures import DataError
from rollout.record import ForecastKey, ForecastRecord
from rollout.trajectory import Trajectory

SCHEMA_VERSION = 1
_KEY = "model, event, date, mode, rollout"
_SCHEMA = f"""
CREATE TABLE version (number INTEGER NOT NULL);
INSERT INTO version VALUES ({SCHEMA_VERSION});
CREATE TABLE scheduled (
    position INTEGER PRIMARY KEY,
    model TEXT NOT NULL, event TEXT NOT NULL, date TEXT NOT NULL, mode TEXT NOT NULL, rollout INTEGER NOT NULL,
    UNIQUE ({_KEY})
);
CREATE TABLE forecasts (
    model TEXT NOT NULL, event TEXT NOT NULL, date TEXT NOT NULL, mode TEXT NOT NULL, rollout INTEGER NOT NULL,
    failure TEXT,
    record TEXT NOT NULL,
    trajectory BLOB,
    PRIMARY KEY ({_KEY}),
    FOREIGN KEY ({_KEY}) REFERENCES scheduled ({_KEY})
);
"""


class Ledger:
    """One SQLite file with a single writer. Readers may open it while the run goes on."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    @classmethod
    def create(cls, path: Path, schedule: Iterable[ForecastKey]) -> Self:
        """A new ledger that expects every key of `schedule`. Raises DataError if a key stands twice."""
        connection = _connect(path)
        keys = [_row(key) for key in schedule]
        try:
            with connection:
                connection.executescript("BEGIN;" + _SCHEMA)
                connection.executemany(f"INSERT INTO scheduled ({_KEY}) VALUES (?, ?, ?, ?, ?)", keys)
        except sqlite3.IntegrityError as error:
            connection.close()
            raise DataError(f"ledger {path}: the schedule holds a forecast twice ({error})") from error
        return cls(connection, path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing ledger. Raises DataError if it is missing or of another version."""
        if not path.is_file():
            raise DataError(f"ledger {path} does not exist; is its folder a run directory?")
        try:
            connection = _connect(path)
            (version,) = connection.execute("SELECT number FROM version").fetchone()
        except sqlite3.DatabaseError as error:
            raise DataError(f"ledger {path} cannot be read: {error}") from error
        if version != SCHEMA_VERSION:
            connection.close()
            raise DataError(f"ledger {path} has version {version}, this code reads {SCHEMA_VERSION}")
        return cls(connection, path)

    def commit(self, record: ForecastRecord, trajectory: Trajectory | None) -> bool:
        """Store one finished forecast in one transaction; False if its key is stored already (the first one stays).

        Raises DataError if the key was never scheduled.
        """
        failure = record.failure.reason if record.failure else None
        blob = None if trajectory is None else zlib.compress(trajectory.model_dump_json().encode(), 6)
        values = (*_row(record.key), failure, record.model_dump_json(), blob)
        try:
            with self._connection:
                added = self._connection.execute(
                    f"INSERT INTO forecasts ({_KEY}, failure, record, trajectory) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
                    f"ON CONFLICT ({_KEY}) DO NOTHING",
                    values,
                ).rowcount
        except sqlite3.IntegrityError as error:
            raise DataError(f"ledger {self.path}: {record.key} was never scheduled") from error
        return added == 1

    def scheduled(self) -> list[ForecastKey]:
        """Every forecast that is expected, in scheduled order."""
        rows = self._connection.execute(f"SELECT {_KEY} FROM scheduled ORDER BY position")
        return [_key(row) for row in rows]

    def finished(self) -> set[ForecastKey]:
        """The keys that have a record."""
        return {_key(row) for row in self._connection.execute(f"SELECT {_KEY} FROM forecasts")}

    def records(self) -> Iterator[ForecastRecord]:
        """All records in scheduled order."""
        rows = self._connection.execute(
            f"SELECT record FROM scheduled JOIN forecasts USING ({_KEY}) ORDER BY scheduled.position"
        )
        for (text,) in rows:
            yield ForecastRecord.model_validate_json(text)

    def trajectory(self, key: ForecastKey) -> Trajectory | None:
        """The trajectory of one key; None when the forecast is missing or left none."""
        blob = self._one("trajectory", key)
        return None if blob is None else Trajectory.model_validate_json(zlib.decompress(blob))

    def failures(self) -> dict[str, int]:
        """Number of records by failure reason."""
        rows = self._connection.execute(
            "SELECT failure, COUNT(*) FROM forecasts WHERE failure IS NOT NULL GROUP BY failure ORDER BY failure"
        )
        return dict(rows.fetchall())

    def close(self) -> None:
        """Close the file; committed records are on disk already."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _one(self, column: str, key: ForecastKey) -> bytes | None:
        where = "model = ? AND event = ? AND date = ? AND mode = ? AND rollout = ?"
        row = self._connection.execute(f"SELECT {column} FROM forecasts WHERE {where}", _row(key)).fetchone()
        return None if row is None else row[0]


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30.0)
    # FULL: a record that was acknowledged survives a power cut, not only a killed process.
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _row(key: ForecastKey) -> tuple[str, str, str, str, int]:
    return key.model, key.event, key.date.isoformat(), key.mode, key.rollout


def _key(row: tuple[str, str, str, str, int]) -> ForecastKey:
    model, event, date, mode, rollout = row
    return ForecastKey.model_validate(
        {"model": model, "event": event, "date": dt.date.fromisoformat(date), "mode": mode, "rollout": rollout}
    )
