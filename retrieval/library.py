"""Library: an index on disk, opened. It exists only where a build has finished."""

import datetime as dt
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from cluster.config import Device, SearchSettings
from cluster.failures import DataError, SettingsError
from retrieval.index_folder import ADDING
from retrieval.lexical import ANALYSIS
from retrieval.manifest import FORMAT, MANIFEST_FILE, IndexKind, Manifest
from retrieval.shard_files import BUILD_POSTINGS, StoredShard, load_days, load_shard


class Library:
    """The manifest and the folder it describes. Shards are checked and opened when they are asked for."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest

    @classmethod
    def open(cls, directory: Path) -> "Library":
        """Raises DataError if there is no finished index, or its manifest is not one of ours."""
        file = directory / MANIFEST_FILE
        try:
            content = file.read_bytes()
            _require_format(file, content)
            manifest = Manifest.model_validate_json(content)
        except OSError as error:
            if (directory / ADDING / MANIFEST_FILE).is_file():
                raise DataError(
                    f"{file}: {error.strerror}; `pastcast index add` was interrupted while its months took their places; run it again"
                ) from error
            raise DataError(
                f"{file}: {error.strerror}; there is no finished index, run `pastcast index build`"
            ) from error
        except ValidationError as error:
            raise DataError(
                f"{file} is not an index manifest of this version: {error}; build the index again"
            ) from error
        if not manifest.shards:
            raise DataError(f"{file} names no shard; build the index again")
        return cls(directory, manifest)

    def require_kind(self, wanted: IndexKind) -> None:
        """Raises SettingsError unless this is the kind of the index, settings of an approximate one included."""
        if self.manifest.kind != wanted:
            raise SettingsError(
                f"{self.directory} is an index of the kind {_shown(self.manifest.kind)}, but the settings ask for {_shown(wanted)}; "
                "change index.kind, or run `pastcast index build`, which encodes nothing again"
            )

    def require_mode(self, search: SearchSettings) -> None:
        """Raises SettingsError unless the index has what searches of this mode read."""
        found = self.manifest.lexical
        if search.mode == "dense" or found == ANALYSIS:
            return
        if found is None:
            raise SettingsError(
                f"{self.directory} is an index without postings, which search.mode {search.mode} needs; {BUILD_POSTINGS}, or set "
                "search.mode: dense"
            )
        raise SettingsError(
            f"the postings of {self.directory} hold words as made by {found}, and queries are analysed by {ANALYSIS}; install that "
            "version, or run `pastcast index build`, which encodes nothing again"
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 that stands for all bytes of the index."""
        return self.manifest.fingerprint

    @property
    def first_day(self) -> dt.date:
        """The day of the earliest article."""
        return min(s.first_day for s in self.manifest.shards)

    @property
    def last_day(self) -> dt.date:
        """The day of the latest article."""
        return max(s.last_day for s in self.manifest.shards)

    @property
    def rows(self) -> int:
        """Number of articles."""
        return sum(s.rows for s in self.manifest.shards)

    def activity(self) -> dict[dt.date, int]:
        """Articles per UTC day, for days that have any. Raises DataError for a damaged day table."""
        return {d: n for s in self.manifest.shards for d, n in load_days(self.directory, s).counts().items()}

    def load(self, months: Iterable[str] | None = None, device: Device = "cpu") -> dict[str, StoredShard]:
        """These months (None: all), checked and open, by month. Raises DataError for a damaged one."""
        wanted = None if months is None else set(months)
        return {
            s.month: load_shard(self.directory, s, device)
            for s in self.manifest.shards
            if wanted is None or s.month in wanted
        }


def _require_format(file: Path, content: bytes) -> None:
    """Raises DataError for an index that another version wrote; what is no manifest at all is left to the caller."""
    try:
        stored = json.loads(content)
    except ValueError:
        return
    found = stored.get("format") if isinstance(stored, dict) else None
    if isinstance(found, str) and found.startswith("pastcast-index-") and found != FORMAT:
        raise DataError(
            f"{file} is a manifest of the format {found}, this version reads {FORMAT}; build the index again with `pastcast index build`"
        )


def _shown(kind: IndexKind) -> str:
    how = kind.approximation
    return kind.name if how is None else f"{kind.name} ({', '.join(f'{k}={v}' for k, v in how.model_dump().items())})"
