"""An index at an fsspec address: fetched once per node, checked by hash, never open half."""

import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path

import fsspec
import pytest
from corpora import corpus
from fsspec.implementations.local import LocalFileSystem

from cluster.config import IndexSettings
from cluster.failures import DataError, InfrastructureError, SettingsError
from retrieval.build import build_index
from retrieval.encoder import HashingEncoder
from retrieval.library import Library
from retrieval.manifest import ShardManifest
from retrieval.remote_index import RemoteIndex, open_index
from retrieval.shard_files import ARTICLES, DAYS, VECTORS, load_shard


@pytest.fixture
def index(tmp_path: Path) -> Library:
    build_index(corpus(), HashingEncoder(), tmp_path / "there")
    return Library.open(tmp_path / "there")


def address(index: Library) -> str:
    return index.directory.as_uri()


def month(index: Library) -> ShardManifest:
    return index.manifest.shards[0]


def test_a_fetched_month_is_the_month(index: Library, tmp_path: Path) -> None:
    remote = RemoteIndex(address(index), tmp_path / "here")
    folder = remote.fetch(index.fingerprint, [month(index)])
    fetched = load_shard(folder, month(index))
    there = load_shard(index.directory, month(index))
    assert [fetched.article(row) for row in range(fetched.days.rows)] == [
        there.article(row) for row in range(there.days.rows)
    ]
    assert not (folder / index.manifest.shards[1].month).exists(), "a node keeps what it serves"


def test_the_driver_plans_from_the_manifest_and_the_day_tables_alone(index: Library, tmp_path: Path) -> None:
    library = open_index(IndexSettings(source=address(index), directory=tmp_path / "here"))
    assert library.manifest == index.manifest
    assert library.fingerprint == index.fingerprint
    assert library.activity() == index.activity()
    assert not list((tmp_path / "here").rglob(VECTORS))
    with pytest.raises(DataError, match=VECTORS):
        library.load()
    local = open_index(IndexSettings(directory=index.directory))
    assert local.manifest == index.manifest


class Counted(LocalFileSystem):
    """Files of this machine, and which of them were opened."""

    protocol = "counted"
    opened: list[str] = []

    def open(self, path: str, mode: str = "rb", **options: object) -> object:
        Counted.opened.append(str(path))
        return super().open(path, mode, **options)


def test_who_comes_while_a_month_is_fetched_waits_and_reads_nothing(index: Library, tmp_path: Path) -> None:
    fsspec.register_implementation("counted", Counted, clobber=True)
    Counted.opened.clear()
    together = threading.Barrier(4)

    def fetch() -> None:
        remote = RemoteIndex(f"counted://{index.directory}", tmp_path / "here")
        together.wait()
        remote.fetch(index.fingerprint, index.manifest.shards)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [f"{index.directory}/{s.month}/{name}" for s in index.manifest.shards for name in s.files]
    assert sorted(Counted.opened) == sorted(wanted)


@pytest.mark.parametrize("name", [VECTORS, DAYS, ARTICLES])
def test_a_file_of_other_bytes_is_refused_by_name_and_leaves_nothing(index: Library, tmp_path: Path, name: str) -> None:
    file = index.directory / month(index).month / name
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    remote = RemoteIndex(address(index), tmp_path / "here")
    with pytest.raises(DataError, match=rf"{month(index).month}/{name} has not the bytes"):
        remote.fetch(index.fingerprint, [month(index)])
    kept = remote.kept(index.fingerprint)
    assert [f.name for f in kept.iterdir()] == [f".{month(index).month}.lock"]


def test_a_missing_file_and_a_missing_index_are_named(index: Library, tmp_path: Path) -> None:
    (index.directory / month(index).month / VECTORS).unlink()
    with pytest.raises(DataError, match=rf"{VECTORS} is missing"):
        RemoteIndex(address(index), tmp_path / "here").fetch(index.fingerprint, [month(index)])
    with pytest.raises(DataError, match=r"manifest.json is missing"):
        RemoteIndex((tmp_path / "elsewhere").as_uri(), tmp_path / "here").library()


def test_an_address_nobody_knows_and_a_place_nobody_reaches(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"index\.source 'gopher://x'"):
        RemoteIndex("gopher://x", tmp_path)

    class Unplugged(LocalFileSystem):
        protocol = "unplugged"

        def open(self, path: str, mode: str = "rb", **options: object) -> object:
            raise ConnectionResetError("no route")

    fsspec.register_implementation("unplugged", Unplugged, clobber=True)
    with pytest.raises(InfrastructureError, match=r"index-unreachable.*no route"):
        RemoteIndex("unplugged:///x", tmp_path).library()


def fetch_and_die(there: str, here: Path, fingerprint: str, shard: ShardManifest) -> None:
    class Dying(LocalFileSystem):
        protocol = "dying"

        def open(self, path: str, mode: str = "rb", **options: object) -> object:
            if str(path).endswith(sorted(shard.files)[-1]):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().open(path, mode, **options)

    fsspec.register_implementation("dying", Dying, clobber=True)
    RemoteIndex(f"dying://{there}", here).fetch(fingerprint, [shard])


def test_a_fetch_that_was_killed_never_opens_and_is_begun_again(index: Library, tmp_path: Path) -> None:
    here = tmp_path / "here"
    arguments = (str(index.directory), here, index.fingerprint, month(index))
    victim = multiprocessing.get_context("spawn").Process(target=fetch_and_die, args=arguments)
    victim.start()
    victim.join()
    remote = RemoteIndex(address(index), here)
    kept = remote.kept(index.fingerprint)
    assert victim.exitcode == -9
    assert (kept / f".fetching-{month(index).month}" / sorted(month(index).files)[0]).exists()
    with pytest.raises(DataError):
        load_shard(kept, month(index))
    load_shard(remote.fetch(index.fingerprint, [month(index)]), month(index))
    assert not list(kept.glob(".fetching-*"))


def test_another_index_in_the_same_folder_is_another_index(index: Library, tmp_path: Path) -> None:
    build_index(corpus(seed=4), HashingEncoder(), tmp_path / "other")
    other = Library.open(tmp_path / "other")
    for library in (index, other):
        folder = RemoteIndex(address(library), tmp_path / "here").fetch(library.fingerprint, [month(library)])
        assert load_shard(folder, month(library)).days.rows == month(library).rows
    shutil.rmtree(index.directory)
    folder = RemoteIndex(address(index), tmp_path / "here").fetch(index.fingerprint, [month(index)])
    assert load_shard(folder, month(index)).days.rows == month(index).rows, "what is here needs no address"
