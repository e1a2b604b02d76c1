"""RemoteIndex: an index at any fsspec address, fetched once per node into a folder and verified by hash.

A month appears in the folder only when all of its files are on the disk with the hashes that the index names; whatever was fetched half
is thrown away by the next who fetches. Processes of one node wait for each other, so that each file is read from the address once.
"""

import contextlib
import fcntl
import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import fsspec

from cluster.config import IndexSettings
from cluster.failures import DataError, InfrastructureError, SettingsError
from retrieval.library import Library
from retrieval.manifest import MANIFEST_FILE, ShardManifest
from retrieval.shard_files import DAYS, sync

_log = logging.getLogger(__name__)

_CHUNK = 8 << 20
_TABLES = "day-tables"
"""Folder of what the driver needs, which plans with day tables and searches nothing."""


class RemoteIndex:
    """The index at one address, and where this node keeps what it fetched."""

    def __init__(self, address: str, folder: Path) -> None:
        """`folder`: of this node alone or shared. Raises SettingsError for an address of which no installed package knows the protocol."""
        self.address = address.rstrip("/")
        self._folder = folder
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise SettingsError(
                f"index.source {address!r} is no address that can be opened here: {error}. It is an fsspec address such as "
                "file:///shared/index or s3://bucket/index; its package (s3fs, gcsfs, adlfs) must be installed"
            ) from error

    def library(self) -> Library:
        """Its manifest and day tables; no shard of it can be opened before it is fetched.

        Raises DataError for what is missing or damaged there, InfrastructureError `index-unreachable`.
        """
        content = self._read(MANIFEST_FILE)
        fetched = self.kept(hashlib.sha256(content).hexdigest()) / _TABLES
        fetched.mkdir(parents=True, exist_ok=True)
        with _alone(fetched / ".lock"):
            (fetched / MANIFEST_FILE).write_bytes(content)
            library = Library.open(fetched)
            for shard in library.manifest.shards:
                self._fetch_folder(fetched, shard, (DAYS,))
        return library

    def kept(self, fingerprint: str) -> Path:
        """The folder of the fetched months of the index with this fingerprint."""
        return self._folder / fingerprint[:16]

    def fetch(self, fingerprint: str, shards: Iterable[ShardManifest]) -> Path:
        """The folder that holds these months, fetched where they are not there yet. Raises as `library` does."""
        folder = self.kept(fingerprint)
        folder.mkdir(parents=True, exist_ok=True)
        for shard in shards:
            with _alone(folder / f".{shard.month}.lock"):
                self._fetch_folder(folder, shard, sorted(shard.files))
        return folder

    def discard(self, fingerprint: str, shard: ShardManifest) -> None:
        """Forget the fetched month, which is not what was fetched any more; who has it open keeps it."""
        folder = self.kept(fingerprint)
        with _alone(folder / f".{shard.month}.lock"):
            shutil.rmtree(folder / shard.month, ignore_errors=True)

    def _fetch_folder(self, folder: Path, shard: ShardManifest, names: Sequence[str]) -> None:
        if (folder / shard.month).is_dir():
            return
        beside = folder / f".fetching-{shard.month}"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir()
            for name in names:
                self._fetch_file(f"{shard.month}/{name}", beside / name, shard.files.get(name, ""))
            sync(beside)
            beside.rename(folder / shard.month)
            sync(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        _log.info("fetched %s of %s into %s", shard.month, self.address, folder)

    def _fetch_file(self, path: str, file: Path, wanted: str) -> None:
        digest = hashlib.sha256()
        with file.open("wb") as target:
            for part in self._parts(path):
                digest.update(part)
                try:
                    target.write(part)
                except OSError as error:
                    raise InfrastructureError(
                        "index-fetch",
                        f"{file} cannot be written: {error}; make room, or choose another index.directory",
                    ) from error
        if digest.hexdigest() != wanted:
            raise DataError(
                f"{self.address}/{path} has not the bytes that its index names; upload it again, or build the index again"
            )
        sync(file)

    def _read(self, path: str) -> bytes:
        return b"".join(self._parts(path))

    def _parts(self, path: str) -> Iterator[bytes]:
        try:
            with self._fs.open(f"{self._root}/{path}", "rb") as stream:
                while part := stream.read(_CHUNK):
                    yield part
        except FileNotFoundError as error:
            raise DataError(
                f"{self.address}/{path} is missing; there is no finished index, upload what `pastcast index build` made"
            ) from error
        except Exception as error:
            # every implementation raises errors of its own, and any of them may pass
            raise InfrastructureError(
                "index-unreachable", f"reading {self.address}/{path} failed: {type(error).__name__}: {error}"
            ) from error


def open_index(index: IndexSettings) -> Library:
    """The index of the settings: the folder itself, or what the driver needs of the one at `index.source`.

    Raises DataError if there is no finished index, InfrastructureError if it cannot be reached.
    """
    directory = index.directory.resolve()
    return Library.open(directory) if index.source is None else RemoteIndex(index.source, directory).library()


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Holds a file's lock, and waits for it."""
    with file.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise SettingsError(
                f"{file} cannot be locked ({error}): its file system has no locks; put index.directory on another one"
            ) from error
        yield
