"""The folder of an index while it is written: one writer at a time, and the manifest, without which nothing opens, last."""

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.failures import DataError
from retrieval.manifest import MANIFEST_FILE, EncoderIdentity, IndexKind, Manifest, ShardManifest
from retrieval.shard_files import sync

ADDING = ".adding"
"""Folder in which `pastcast index add` writes months before they take the places of others."""


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Holds the folder's lock; makes the folder. Raises DataError if another writer has it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another build is working in {directory}; wait for it or choose another directory"
            ) from error
        yield


def withdraw(directory: Path) -> None:
    """Until the new one is whole there is no index: an old manifest must not vouch for new shards."""
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    sync(directory)


def publish(directory: Path, encoder: EncoderIdentity, kind: IndexKind, shards: Sequence[ShardManifest]) -> Manifest:
    """Makes the folder an index of these finished shards, given in order of month."""
    source = hashlib.sha256("".join(f"{s.month} {s.source}\n" for s in shards).encode()).hexdigest()
    manifest = Manifest(encoder=encoder, kind=kind, source=source, shards=tuple(shards))
    file = directory / MANIFEST_FILE
    beside = file.with_suffix(".partial")
    beside.write_bytes(manifest.stored())
    sync(beside)
    beside.rename(file)
    sync(directory)
    return manifest


def move_into_place(directory: Path) -> None:
    """Makes the index that was published in `ADDING`, and shares its other months with `directory`, the index of `directory`.

    Can be repeated after a crash at any moment; between the first and the last rename there is no index. Without effect where
    nothing was published.
    """
    adding = directory / ADDING
    if not (adding / MANIFEST_FILE).is_file():
        return
    manifest = Manifest.model_validate_json((adding / MANIFEST_FILE).read_bytes())
    withdraw(directory)
    for shard in manifest.shards:
        if (adding / shard.month).is_dir():
            shutil.rmtree(directory / shard.month, ignore_errors=True)
            (adding / shard.month).rename(directory / shard.month)
    sync(directory)
    (adding / MANIFEST_FILE).rename(directory / MANIFEST_FILE)
    sync(directory)
    shutil.rmtree(adding)
