"""How a ledger lies in its SQLite file: tables, connection, and rows as values."""

import datetime as dt
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.changes import Committed
from rollout.record import ForecastKey

SCHEMA_VERSION = 2
KEY = "model, event, date, mode, rollout"
IS_KEY = "model = ? AND event = ? AND date = ? AND mode = ? AND rollout = ?"
# What is read for every record of a run stands apart from what is large: opening a run must not read its trajectories.
SCHEMA = f"""
CREATE TABLE version (number INTEGER NOT NULL);
INSERT INTO version VALUES ({SCHEMA_VERSION});
CREATE TABLE scheduled (
    position INTEGER PRIMARY KEY,
    model TEXT NOT NULL, event TEXT NOT NULL, date TEXT NOT NULL, mode TEXT NOT NULL, rollout INTEGER NOT NULL,
    UNIQUE ({KEY})
);
-- Append-only. `change` numbers everything that happens to the ledger: commits here and retractions in `superseded`.
CREATE TABLE forecasts (
    change INTEGER PRIMARY KEY,
    position INTEGER NOT NULL REFERENCES scheduled (position),
    committed TEXT NOT NULL,
    kind TEXT, reason TEXT, notebook TEXT,
    output_tokens INTEGER NOT NULL, price REAL NOT NULL
);
CREATE TABLE contents (
    change INTEGER PRIMARY KEY REFERENCES forecasts (change),
    record TEXT NOT NULL,
    trajectory BLOB
);
CREATE TABLE current (
    position INTEGER PRIMARY KEY REFERENCES scheduled (position),
    forecast INTEGER NOT NULL UNIQUE REFERENCES forecasts (change)
);
CREATE TABLE superseded (
    change INTEGER PRIMARY KEY,
    forecast INTEGER NOT NULL UNIQUE REFERENCES forecasts (change),
    at TEXT NOT NULL,
    why TEXT NOT NULL
);
"""


def connect(path: Path) -> sqlite3.Connection:
    """Opens or makes the file."""
    # Transactions are begun by hand, and the writer may commit from a thread so that its loop does not wait for the disk.
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    # Trajectories are tens of kilobytes: larger pages halve the time of a batch (of a new file; others keep theirs).
    # FULL: a record that was acknowledged survives a power cut, not only a killed process.
    for pragma in ("page_size = 16384", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def committed(row: Sequence[Any]) -> Committed:
    """From the columns of its key, then change, committed, kind, reason, notebook, output_tokens, price, record, trajectory."""
    change, at, kind, reason, notebook, output_tokens, price, record, trajectory = row[5:]
    return Committed(
        change=change,
        at=dt.datetime.fromisoformat(at),
        key=key_of(row[:5]),
        kind=kind,
        reason=reason,
        notebook=notebook,
        output_tokens=output_tokens,
        price=price,
        record=record,
        trajectory=trajectory,
    )


def row_of(key: ForecastKey) -> tuple[str, str, str, str, int]:
    """The columns `KEY`."""
    return key.model, key.event, key.date.isoformat(), key.mode, key.rollout


def key_of(row: Sequence[object]) -> ForecastKey:
    """From the columns `KEY`."""
    model, event, date, mode, rollout = row
    return ForecastKey.model_validate(
        {"model": model, "event": event, "date": dt.date.fromisoformat(str(date)), "mode": mode, "rollout": rollout}
    )
