import asyncio
import datetime as dt
import os
import shutil
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import ray
from corpora import START, WORDS, corpus

from cluster.config import Settings, load_settings
from cluster.failures import DataError, InfrastructureError, SettingsError
from retrieval.article import Hit
from retrieval.build import build_index
from retrieval.encoder import HashingEncoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.pool import RetrievalClient, start_retrieval_pool
from retrieval.shard_files import VECTORS
from retrieval.view import DatedView

pytestmark = pytest.mark.ray

CUTOFFS = [START.date() + dt.timedelta(days=n) for n in (-1, 0, 11, 12, 40, 70)]


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pool") / "index"
    build_index(corpus(), HashingEncoder(), directory)
    return directory


def settings_for(index: Path, *overrides: str) -> Settings:
    return load_settings(overrides=[f"index.directory={index}", "index.encoder=hashing", *overrides])


async def ask(client: RetrievalClient | LocalSearcher) -> list[tuple[Hit, ...]]:
    """Many searches at once, some of them of one batch with different days and sizes."""
    calls = [
        client.search(f"{a} {b}", first, cutoff, 1 + i % 7)
        for i, (a, b) in enumerate(pairwise(WORDS))
        for cutoff in CUTOFFS
        for first in (None, cutoff - dt.timedelta(days=9))
    ]
    return list(await asyncio.gather(*calls))


@ray.remote(num_cpus=0)
def search_elsewhere(client: RetrievalClient, cutoff: dt.date) -> tuple[Hit, ...]:
    return asyncio.run(DatedView(client, cutoff).search("copper tariff", 3))


@pytest.mark.usefixtures("session")
def test_the_pool_answers_like_the_local_searcher_also_after_an_actor_was_killed(index: Path) -> None:
    local = LocalSearcher(Library.open(index), HashingEncoder())
    expected = asyncio.run(ask(local))
    pool = start_retrieval_pool(settings_for(index))
    try:
        client = pool.client()
        assert len(pool.processes) == len(set(pool.processes)) == 2
        assert asyncio.run(ask(client)) == expected
        one = corpus()[0]
        assert asyncio.run(client.fetch(one.id)) == one
        assert asyncio.run(client.fetch("absent")) is None
        assert asyncio.run(client.fetch("\ud800")) is None
        assert asyncio.run(client.search("\ud800 harbour", None, CUTOFFS[-1], 3))
        elsewhere = ray.get(search_elsewhere.remote(client, CUTOFFS[3]))
        assert elsewhere == asyncio.run(DatedView(local, CUTOFFS[3]).search("copper tariff", 3))

        async def kill_while_asking() -> list[tuple[Hit, ...]]:
            asking = asyncio.create_task(ask(client))
            await asyncio.sleep(0)
            os.kill(pool.processes[0], signal.SIGKILL)
            return await asking

        assert asyncio.run(kill_while_asking()) == expected
        assert asyncio.run(ask(client)) == expected
    finally:
        pool.close()
    with pytest.raises(InfrastructureError, match="retrieval-gone"):
        asyncio.run(client.search("harbour", None, CUTOFFS[-1], 3))


@pytest.mark.usefixtures("session")
def test_a_lost_actor_is_an_infrastructure_failure_and_never_an_empty_result(index: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(index, tmp_path / "index")
    pool = start_retrieval_pool(settings_for(copy, "retrieval.request_timeout_s=60"))
    try:
        client = pool.client()
        for vectors in copy.glob(f"*/{VECTORS}"):
            vectors.unlink()
        for process in pool.processes:
            os.kill(process, signal.SIGKILL)
        with pytest.raises(InfrastructureError, match=f"retrieval-gone.*{VECTORS}"):
            asyncio.run(client.search("harbour", None, CUTOFFS[-1], 3))
        assert asyncio.run(client.search("harbour", None, CUTOFFS[0], 3)) == ()
    finally:
        pool.close()


@pytest.mark.usefixtures("session")
def test_an_answer_that_does_not_come_in_time_is_an_infrastructure_failure(index: Path) -> None:
    pool = start_retrieval_pool(settings_for(index))
    try:
        for process in pool.processes:
            os.kill(process, signal.SIGSTOP)
        hurried = RetrievalClient(pool._encoder, pool._shards, timeout_s=0.5)
        with pytest.raises(InfrastructureError, match=r"retrieval-lost: no answer within 0.5 s"):
            asyncio.run(hurried.search("harbour", None, CUTOFFS[-1], 3))
    finally:
        for process in pool.processes:
            os.kill(process, signal.SIGCONT)
        pool.close()


@pytest.mark.usefixtures("session")
def test_a_pool_does_not_start_on_a_damaged_shard_or_another_encoder(index: Path, tmp_path: Path) -> None:
    build_index(corpus(), HashingEncoder(16), tmp_path / "other")
    with pytest.raises(SettingsError, match="encoder"):
        start_retrieval_pool(settings_for(tmp_path / "other"))
    damaged = shutil.copytree(index, tmp_path / "damaged")
    (damaged / "2024-06" / VECTORS).write_bytes(b"")
    with pytest.raises(DataError, match=VECTORS):
        start_retrieval_pool(settings_for(damaged))


@pytest.mark.usefixtures("session")
def test_a_pool_that_finds_no_cpus_says_so_instead_of_waiting_for_ever(index: Path) -> None:
    wanting = settings_for(index, "retrieval.actor_cpus=64", "retrieval.start_timeout_s=0.5")
    with pytest.raises(InfrastructureError, match=r"retrieval-start.*retrieval\.actor_cpus"):
        start_retrieval_pool(wanting)


@pytest.mark.parametrize("k", [0, 1001])
def test_a_client_refuses_a_top_k_out_of_bounds(k: int) -> None:
    with pytest.raises(ValueError, match="top k"):
        asyncio.run(RetrievalClient(None, (), 1.0).search("harbour", None, CUTOFFS[0], k))
