"""The run directory: one resolved configuration, one manifest, one ledger, and the inputs that scores need.

A run directory is never shared: it is locked while a process works in it, and an existing one is resumed only if its
manifest equals the new one. The manifest is written last, so a directory without one was never started.
"""

import contextlib
import datetime as dt
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field, ValidationError

from cluster.config import Settings, dump_settings, load_settings
from cluster.failures import DataError, SettingsError
from cluster.lock import try_lock
from cluster.record import Record
from retrieval.corpus.rows import QuarantinedRow
from rollout.changes import Change
from rollout.events.event import Belief, Event
from rollout.ledger import Ledger
from rollout.manifest import Manifest, differences
from rollout.record import ForecastKey

Floor = Mapping[tuple[str, dt.date], Belief]
"""Best possible forecast of a synthetic world, by (event id, day)."""
QUARANTINE_FILE = "events.jsonl"
"""Under `quarantine/`: the rows of the events file that were not used."""
STATUS_FILE = "status.json"
"""What the driver says of the run while it goes on."""
_QUARANTINE = f"quarantine/{QUARANTINE_FILE}"
LOCK_SECONDS = 1.0
"""How long a lock is tried for: `in_use` holds it for an instant."""


class RunDirectory:
    """Paths and readers of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "manifest.json").is_file()

    @property
    def quarantine(self) -> Path:
        """Folder of the rows that were not used, with their reasons."""
        return self.path / "quarantine"

    def settings(self) -> Settings:
        """The resolved settings."""
        return load_settings([self._file("settings.yaml")])

    def manifest(self) -> Manifest:
        """What the run came from."""
        return Manifest.model_validate_json(self._file("manifest.json").read_text())

    def events(self) -> dict[str, Event]:
        """The run's events by id, outcomes included: for scores, never for agents."""
        with self._file("events.jsonl").open() as lines:
            events = [Event.model_validate_json(line) for line in lines]
        return {e.id: e for e in events}

    def floor(self) -> Floor:
        """A synthetic world's best possible forecasts; empty for real events."""
        file = self.path / "floor.jsonl"
        return read_floor(file) if file.is_file() else {}

    def unused(self) -> list[QuarantinedRow]:
        """The rows of the events file that gave no event."""
        file = self.path / _QUARANTINE
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [QuarantinedRow.model_validate_json(line) for line in lines]

    def ledger(self) -> Ledger:
        """The run's ledger, opened."""
        return Ledger.open(self._file("ledger.sqlite"))

    def create(
        self,
        settings: Settings,
        manifest: Manifest,
        events: Iterable[Event],
        schedule: Iterable[ForecastKey],
        floor: Floor,
        unused: Iterable[QuarantinedRow] = (),
    ) -> None:
        """Lay a new run; `unused` are the input's rows that gave no event.

        What a killed creation left behind is replaced. Raises SettingsError for a started run.
        """
        self.require_new()
        self.lay(start_content(settings, manifest, events, floor, unused), schedule)

    def require_new(self) -> None:
        """Raises SettingsError if a run was started here."""
        if self.exists:
            raise SettingsError(
                f"{self.path} holds a run already; resume it with --resume or choose another run.directory"
            )

    def start_files(self) -> dict[str, Path]:
        """What the run was begun with, by name: all that `lay` needs besides the schedule."""
        names = ("settings.yaml", "events.jsonl", "floor.jsonl", _QUARANTINE, "manifest.json")
        return {name: self.path / name for name in names if (self.path / name).is_file()}

    def lay(
        self,
        files: Mapping[str, bytes],
        schedule: Iterable[ForecastKey],
        changes: Iterable[Sequence[Change]] = (),
    ) -> None:
        """Write a whole run: its start files, its schedule and what happened in it. The manifest goes last."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "floor.jsonl", _QUARANTINE):
            (self.path / leftover).unlink(missing_ok=True)
        for name, content in files.items():
            if name != "manifest.json":
                self._write(name, content)
        with Ledger.create(self.path / "ledger.sqlite", schedule) as ledger:
            for batch in changes:
                ledger.replay(batch)
        self._write("manifest.json", files["manifest.json"])

    def check_resumable(self, manifest: Manifest) -> None:
        """Raises SettingsError with every difference if the run came from something else."""
        changed = differences(self.manifest(), manifest)
        if changed:
            lines = "\n".join(f"  {line}" for line in changed)
            raise SettingsError(
                f"{self.path} cannot be resumed: it came from something else (old → new):\n{lines}\n"
                "Restore these, or start a new run with another run.directory."
            )

    def lock(self) -> IO[bytes]:
        """Hold the run for this process until the returned file is closed. Raises SettingsError if another holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = (self.path / "lock").open("wb")
        tries = 10
        with contextlib.ExitStack() as stack:
            stack.enter_context(handle)
            for left in reversed(range(tries)):
                if try_lock(handle):
                    stack.pop_all()
                    return handle
                if left:
                    time.sleep(LOCK_SECONDS / tries)
            raise SettingsError(f"{self.path} is in use by another process; wait for it or choose another directory")

    def in_use(self) -> bool:
        """Whether a process works in this run."""
        try:
            handle = (self.path / "lock").open("rb")
        except FileNotFoundError:
            return False
        with handle:
            return not try_lock(handle, shared=True)

    def write_status(self, text: str) -> None:
        """Replace the run's status. It may be lost in a power cut: the ledger is the truth."""
        part = self.path / f"{STATUS_FILE}.part"
        part.write_text(text)
        part.replace(self.path / STATUS_FILE)

    def _file(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise DataError(f"{self.path} is not a run directory: {name} is missing")
        return file

    def _write(self, name: str, content: bytes) -> None:
        part = self.path / f"{name}.part"
        part.parent.mkdir(exist_ok=True)
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(self.path / name)
        # The new name as well: a directory without its manifest is taken for one that was never started.
        folder = os.open(part.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def start_content(
    settings: Settings,
    manifest: Manifest,
    events: Iterable[Event],
    floor: Floor,
    unused: Iterable[QuarantinedRow] = (),
) -> dict[str, bytes]:
    """What a run is begun with, as `RunDirectory.lay` takes it."""
    files = {
        "settings.yaml": dump_settings(settings),
        "events.jsonl": "".join(e.model_dump_json() + "\n" for e in events),
        "manifest.json": manifest.model_dump_json(indent=1),
    }
    if floor:
        files["floor.jsonl"] = dump_floor(floor)
    if rows := list(unused):
        files[_QUARANTINE] = "".join(row.model_dump_json() + "\n" for row in rows)
    return {name: text.encode() for name, text in files.items()}


class _FloorRow(Record):
    event: str
    date: dt.date
    probabilities: Annotated[dict[str, Annotated[float, Field(ge=0, le=1, strict=True)]], Field(min_length=1)]


def read_floor(file: Path) -> dict[tuple[str, dt.date], Belief]:
    """A world's `floor.jsonl`: one row per (event, date). Raises DataError that names the row."""
    floor: dict[tuple[str, dt.date], Belief] = {}
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = _FloorRow.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "the row"
                raise DataError(
                    f"{file}, row {number}: not a floor row ({where}: {first['msg']}); make the world again"
                ) from error
            floor[row.event, row.date] = row.probabilities
    return floor


def dump_floor(floor: Floor) -> str:
    """The text that `read_floor` reads."""
    return "".join(
        json.dumps({"event": event, "date": day.isoformat(), "probabilities": p}) + "\n"
        for (event, day), p in floor.items()
    )
