import asyncio
import datetime as dt
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
from corpora import START, WORDS, corpus

from cluster.config import Settings, load_settings
from cluster.failures import DataError, InfrastructureError, SettingsError
from retrieval.article import Hit
from retrieval.build import build_index
from retrieval.client import CallRules, RetrievalClient
from retrieval.encoder import HashingEncoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.pool import RetrievalPool, start_retrieval_pool
from retrieval.scan import Span
from retrieval.shard_files import VECTORS
from retrieval.view import DatedView

pytestmark = pytest.mark.ray

CUTOFFS = [START.date() + dt.timedelta(days=n) for n in (-1, 0, 11, 12, 40, 70)]


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    # metrics soon, so that the test of them need not wait for long
    quickly = {"metrics_report_interval_ms": 500}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _system_config=quickly)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pool") / "index"
    build_index(corpus(), HashingEncoder(), directory)
    return directory


def settings_for(index: Path, *overrides: str) -> Settings:
    return load_settings(overrides=[f"index.directory={index}", "index.encoder=hashing", *overrides])


@pytest.fixture(scope="module")
def small_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("narrow") / "index"
    build_index(corpus(100, seed=5), HashingEncoder(), directory)
    return directory


@pytest.fixture(scope="module")
def narrow(session: None, small_index: Path) -> Iterator[RetrievalPool]:
    """One shard actor with room for few queries, over an index of its own."""
    pool = start_retrieval_pool(
        settings_for(small_index, "retrieval.shard_actors=1", "retrieval.batch=8", "retrieval.queue=5")
    )
    yield pool
    pool.close()


QUESTIONS = [
    (f"{a} {b}", first, cutoff, 1 + i % 7)
    for i, (a, b) in enumerate(pairwise(WORDS))
    for cutoff in CUTOFFS
    for first in (None, cutoff - dt.timedelta(days=9))
]


async def ask(client: RetrievalClient | LocalSearcher) -> list[tuple[Hit, ...]]:
    """Many searches at once, some of them of one batch with different days and sizes."""
    return list(await asyncio.gather(*(client.search(*question) for question in QUESTIONS)))


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


def test_an_answer_that_does_not_come_in_time_is_an_infrastructure_failure(narrow: RetrievalPool) -> None:
    [process] = narrow.processes
    os.kill(process, signal.SIGSTOP)
    try:
        hurried = narrow.client(CallRules(timeout_s=0.5, silence_s=30))
        with pytest.raises(InfrastructureError, match=r"retrieval-lost: no answer within 0.5 s"):
            asyncio.run(hurried.search("harbour", None, CUTOFFS[-1], 3))
    finally:
        os.kill(process, signal.SIGCONT)


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
        asyncio.run(
            RetrievalClient(None, (), CallRules(timeout_s=1, silence_s=1)).search("harbour", None, CUTOFFS[0], k)
        )


@ray.remote(num_cpus=0)
def ask_elsewhere(client: RetrievalClient, questions: list[tuple[str, dt.date | None, dt.date, int]]) -> list[Any]:
    async def all_at_once() -> list[Any]:
        return list(await asyncio.gather(*(client.search(*question) for question in questions)))

    return asyncio.run(all_at_once())


def test_a_full_queue_lets_callers_of_many_processes_wait_and_fails_nobody(
    small_index: Path, narrow: RetrievalPool
) -> None:
    expected = asyncio.run(ask(LocalSearcher(Library.open(small_index), HashingEncoder())))
    [before] = narrow.figures()
    assert ray.get([ask_elsewhere.remote(narrow.client(), QUESTIONS) for _ in range(4)]) == [expected] * 4
    [figures] = narrow.figures()
    assert figures.longest_queue == 5
    span = Span.of(narrow.manifest.shards)
    visible = sum(span.meets(first, cutoff) for _, first, cutoff, _ in QUESTIONS)
    assert 0 < visible < len(QUESTIONS)
    work = figures.work - before.work
    assert work.queries == 4 * visible, "where nothing can be visible, nobody is asked"
    assert 1 < work.mean_batch <= 5


def vectors_in_memory(process: int) -> dict[str, int]:
    """KiB by kind over the process's mappings of vector files, from /proc."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            inside = line.endswith(VECTORS)
        elif inside and values[-1] == "kB":
            found[name.rstrip(":")] = found.get(name.rstrip(":"), 0) + int(values[0])
    return found


@pytest.mark.usefixtures("session")
def test_actors_of_one_node_share_the_pages_of_the_vectors_and_copy_none(tmp_path: Path) -> None:
    build_index(corpus(3_000), HashingEncoder(), tmp_path)
    pool = start_retrieval_pool(settings_for(tmp_path, "retrieval.shard_actors=1", "retrieval.replicas=2"))
    try:
        asyncio.run(ask(pool.client()))
        for process in pool.processes:
            pages = vectors_in_memory(process)
            assert pages["Rss"] >= 3_000 * 256 * 4 / 1024
            assert pages["Shared_Clean"] == pages["Rss"]
            assert pages["Private_Clean"] == pages["Private_Dirty"] == pages["Shared_Dirty"] == pages["Anonymous"] == 0
        # every page is there once: the processes' shares of it add up to one
        shares = [vectors_in_memory(process)["Pss"] for process in pool.processes]
        assert sum(shares) == pytest.approx(pages["Rss"], rel=0.01)
    finally:
        pool.close()


@pytest.mark.usefixtures("session")
def test_an_index_elsewhere_is_served_like_one_at_hand(index: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    pool = start_retrieval_pool(settings_for(here, f"index.source={index.as_uri()}", "retrieval.replicas=2"))
    try:
        expected = asyncio.run(ask(LocalSearcher(Library.open(index), HashingEncoder())))
        assert asyncio.run(ask(pool.client())) == expected
        # what was fetched is damaged, and the actor that starts on it fetches it anew
        [vectors] = here.glob(f"*/2024-06/{VECTORS}")
        vectors.unlink()
        vectors.write_bytes(b"?")
        for process in pool.processes:
            os.kill(process, signal.SIGKILL)
        assert asyncio.run(ask(pool.client())) == expected
    finally:
        pool.close()


def test_shard_actors_publish_what_they_do_as_ray_metrics(narrow: RetrievalPool) -> None:
    node = next(n for n in ray.nodes() if n["Alive"])
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    asyncio.run(ask(narrow.client()))
    [figures] = narrow.figures()
    published: dict[str, float] = {}
    deadline = time.monotonic() + 60
    while published.get("queries_total", 0) < figures.work.queries:
        assert time.monotonic() < deadline, "the figures never came"
        time.sleep(0.2)
        with urllib.request.urlopen(address) as answer:
            text = answer.read().decode()
        tags = f'group="0",index="{narrow.manifest.fingerprint[:12]}",replica="0"'
        lines = [line for line in text.splitlines() if all(tag in line for tag in tags.split(","))]
        published = {line.split("{")[0].removeprefix("ray_pastcast_shard_"): float(line.split()[-1]) for line in lines}
    assert published.keys() == {"queue", "batch", "queries_total", "batches_total", "rows_total", "seconds_total"}
    sums = {f"{name}_total": value for name, value in figures.work.model_dump().items() if value}
    assert {name: published[name] for name in sums} == pytest.approx(sums)
