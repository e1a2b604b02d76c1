"""Foreign rows become records, one by one, and a bad row never ends a load.

A row is an object of a JSON-lines or Parquet file with its number: the line, or the Parquet row, counted from 1. Whatever
is wrong with one (bytes that are not UTF-8, a line that is not JSON, a value that does not fit) puts it in quarantine
under a named reason with its number, and the load goes on. Only a file that cannot be opened at all is an error.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, Literal, Self, TypeVar

import pyarrow
import pyarrow.parquet
from pydantic import ValidationError

from cluster.config import FieldMapping
from cluster.failures import DataError
from cluster.record import Record

RowFormat = Literal["pastcast", "jsonl", "parquet"]
Values = dict[str, Any]
T = TypeVar("T")

_DETAIL_CHARACTERS = 500
_PARQUET_BATCH = 1024


class BadRow(DataError):
    """One row cannot become a record. `reason` is the stable name it is counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class QuarantinedRow(Record):
    """One row that was left out."""

    file: str
    row: int
    """Line of a JSON-lines file or row of a Parquet file, from 1."""
    id: str | None
    reason: str
    detail: str


class Loaded(Record, Generic[T]):
    """What a file gave."""

    records: tuple[T, ...]
    quarantined: dict[str, int]
    """Rows left out, by reason."""
    naive_times: int
    """Times without an offset that were taken in the configured zone."""


class Quarantine:
    """Bad rows of one file, written as JSON lines to `directory/<name>.jsonl` as they come; nowhere without a directory.

    The file of an earlier load is replaced; it exists afterwards only if there were bad rows.
    """

    def __init__(self, file: Path, directory: Path | None, name: str) -> None:
        self._file = file
        self._target = None if directory is None else directory / f"{name}.jsonl"
        self._stream: IO[str] | None = None
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if self._target is not None:
            self._target.unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()

    @property
    def counts(self) -> dict[str, int]:
        """Bad rows by reason, most frequent first."""
        return dict(self._counts.most_common())

    def add(self, row: int, bad: BadRow, row_id: str | None = None) -> None:
        """Counts and writes one bad row."""
        self._counts[bad.reason] += 1
        if self._target is None:
            return
        if self._stream is None:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._target.open("w", encoding="utf-8")
        entry = QuarantinedRow(
            file=str(self._file), row=row, id=row_id, reason=bad.reason, detail=bad.detail[:_DETAIL_CHARACTERS]
        )
        self._stream.write(json.dumps(entry.model_dump()) + "\n")


def load_rows(
    path: Path,
    row_format: RowFormat,
    build: Callable[[Values, int], T],
    quarantine_dir: Path | None,
    name: str,
) -> tuple[tuple[T, ...], dict[str, int]]:
    """The records that `build` makes of each (row, row number), and the bad rows counted by reason.

    `build` refuses a row by raising BadRow or pydantic's ValidationError. Raises DataError if the file cannot be read.
    """
    records = []
    with Quarantine(path, quarantine_dir, name) as quarantine:
        for number, row in read_rows(path, row_format):
            row_id = None
            try:
                if isinstance(row, BadRow):
                    raise row
                row_id = str(row["id"]) if row.get("id") is not None else None
                records.append(build(row, number))
            except BadRow as bad:
                quarantine.add(number, bad, row_id)
            except ValidationError as error:
                quarantine.add(number, _from_validation(error), row_id)
        return tuple(records), quarantine.counts


def read_rows(path: Path, row_format: RowFormat) -> Iterator[tuple[int, Values | BadRow]]:
    """(row number, the row or why it cannot be read), streamed. Raises DataError if the file itself cannot be read."""
    try:
        yield from _parquet_rows(path) if row_format == "parquet" else _json_lines(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; check the path in the settings") from error
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Values | BadRow]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, _json_row(line)


def _json_row(line: bytes) -> Values | BadRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():
            # An escaped half of a surrogate pair is JSON, but no text that could be stored or tokenized.
            json.dumps(row, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return BadRow("not-utf8", f"{error.reason} at {error.start}")
    except (ValueError, RecursionError) as error:
        return BadRow("not-json", str(error))
    if not isinstance(row, dict):
        return BadRow("not-an-object", f"the line holds a {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[int, Values | BadRow]]:
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_PARQUET_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def mapped_values(row: Values, mapping: FieldMapping) -> Values:
    """The record's fields out of a foreign row: constants, then mapped paths; a path that leads nowhere gives no field."""
    values = dict(mapping.constants)
    for field, path in mapping.fields.items():
        value = at_path(row, path)
        if value is not None:
            values[field] = value
    return values


def at_path(row: Any, path: str) -> Any:
    """The value at a dotted path (`metadata.close_time`, `items.0.name`), or None. A key that holds dots itself wins."""
    if isinstance(row, Mapping) and path in row:
        return row[path]
    head, _, rest = path.partition(".")
    if isinstance(row, Mapping) and head in row:
        inner = row[head]
    elif isinstance(row, list) and head.isdecimal() and int(head) < len(row):
        inner = row[int(head)]
    else:
        return None
    return at_path(inner, rest) if rest else inner


def text_value(values: Values, field: str) -> str:
    """A field as text; absent or null is empty. Raises BadRow `invalid-field` for anything but text and numbers."""
    value = values.get(field)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow("invalid-field", f"{field} is a {type(value).__name__}, not text")
    return str(value)


def stable_id(url: str) -> str:
    """An id for a record that has none: the same for the same url in every process."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def identity(values: Values) -> str:
    """The row's id, or one made from its url. Raises BadRow `missing-field` if it has neither."""
    given = text_value(values, "id")
    if given:
        return given
    url = text_value(values, "url")
    if not url:
        raise BadRow("missing-field", "neither id nor url; map one of them")
    return stable_id(url)


def _from_validation(error: ValidationError) -> BadRow:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    reason = {"missing": "missing-field", "extra_forbidden": "unknown-field"}.get(first["type"], "invalid-field")
    return BadRow(reason, f"{where}: {first['msg']}")
