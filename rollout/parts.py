"""The parts of a mirror: changes of a ledger as immutable Parquet files whose names say what they hold.

A name carries the part's number, its first and last change and the SHA-256 of its bytes, so that a damaged, missing or
foreign part is found by arithmetic. A part counts once its empty companion `….committed` exists, which is written after
it: a part that was being written when its driver died is not taken for one. Nothing here touches a store.
"""

import datetime as dt
import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.failures import DataError
from cluster.record import Record
from rollout.changes import Change, Committed, Superseded
from rollout.mirror_store import CONFIRMATION
from rollout.record import ForecastKey

FOLDER = "parts"

PARTS_IN_FOLDER = 1000
"""Listing a folder stays one request."""

_NAME = re.compile(r"(\d{8})-(\d+)-(\d+)-([0-9a-f]{64})\.parquet")
_TIME = pa.timestamp("us", tz="UTC")
_SCHEMA = pa.schema(
    [
        ("change", pa.int64()),
        ("at", _TIME),
        ("supersedes", pa.int64()),
        ("why", pa.string()),
        ("model", pa.string()),
        ("event", pa.string()),
        ("date", pa.date32()),
        ("mode", pa.string()),
        ("rollout", pa.int64()),
        ("kind", pa.string()),
        ("reason", pa.string()),
        ("notebook", pa.string()),
        ("output_tokens", pa.int64()),
        ("price", pa.float64()),
        ("record", pa.string()),
        ("trajectory", pa.binary()),
    ]
)


class Part(Record):
    """What the name of a part says."""

    number: int
    """From 1, without gaps."""
    first: int
    """Its first change."""
    last: int
    digest: str
    """SHA-256 of its bytes."""

    @property
    def path(self) -> str:
        """Below the mirror's address."""
        return f"{folder_of(self.number)}/{self.number:08d}-{self.first}-{self.last}-{self.digest}.parquet"

    @classmethod
    def named(cls, path: str) -> Self | None:
        """The part of that path; None if it is none."""
        found = _NAME.fullmatch(path.rsplit("/", 1)[-1])
        if found is None:
            return None
        return cls(number=int(found[1]), first=int(found[2]), last=int(found[3]), digest=found[4])


def folder_of(number: int) -> str:
    """The folder of the part of that number."""
    return f"{FOLDER}/{number // PARTS_IN_FOLDER:05d}"


def committed_parts(paths: Iterable[str], address: str) -> list[Part]:
    """The parts that count among `paths`, in order. Raises DataError that names a part which is missing or one too many."""
    stems = {p.rsplit("/", 1)[-1] for p in paths}
    found = [Part.named(s.removesuffix(CONFIRMATION)) for s in stems if s.endswith(CONFIRMATION)]
    parts = sorted((p for p in found if p is not None), key=lambda p: (p.number, p.digest))
    expected, after = 1, 0
    for part in parts:
        if part.number != expected:
            twice = part.number < expected
            what = (
                f"two parts have the number {part.number}: two drivers wrote here"
                if twice
                else f"part {expected} is missing"
            )
            raise DataError(f"mirror {address}: {what}; see {part.path}")
        if part.first != after + 1 or part.last < part.first:
            raise DataError(
                f"mirror {address}: {part.path} does not follow change {after}: two drivers wrote here, or a part was renamed"
            )
        expected, after = expected + 1, part.last
    return parts


def pack_part(number: int, changes: Sequence[Change]) -> tuple[Part, bytes]:
    """A part of these changes, of which there is at least one."""
    rows = [_row(c) for c in changes]
    columns = {name: [row.get(name) for row in rows] for name in _SCHEMA.names}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, schema=_SCHEMA), sink, compression="zstd")
    data = sink.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    return Part(number=number, first=changes[0].change, last=changes[-1].change, digest=digest), data


def unpack_part(part: Part, data: bytes, address: str) -> list[Change]:
    """The changes of a part. Raises DataError that names it if its bytes are not those it was named for."""
    if hashlib.sha256(data).hexdigest() != part.digest:
        raise DataError(
            f"mirror {address}: {part.path} is damaged: its {len(data)} bytes do not have the hash in its name; "
            "bring it back from a copy. Without it the forecasts it holds, and those after it, are lost"
        )
    changes = [_change(row) for row in pq.read_table(io.BytesIO(data)).to_pylist()]
    if [c.change for c in changes] != list(range(part.first, part.last + 1)):
        raise DataError(f"mirror {address}: {part.path} does not hold the changes that its name says")
    return changes


def _row(change: Change) -> dict[str, Any]:
    if isinstance(change, Superseded):
        return {"change": change.change, "at": change.at, "supersedes": change.forecast, "why": change.why}
    key = change.key.model_dump()
    return {**key, **{name: getattr(change, name) for name in Committed.model_fields if name != "key"}}


def _change(row: dict[str, Any]) -> Change:
    at: dt.datetime = row["at"]
    if row["supersedes"] is not None:
        return Superseded(change=row["change"], forecast=row["supersedes"], at=at.astimezone(dt.UTC), why=row["why"])
    key = ForecastKey.model_validate({name: row[name] for name in ForecastKey.model_fields})
    rest = {name: row[name] for name in Committed.model_fields if name not in ("key", "at")}
    return Committed(key=key, at=at.astimezone(dt.UTC), **rest)
