"""The pool on several nodes: actors and a whole node are killed under load, and every query is answered as if nothing had been."""

import asyncio
import datetime as dt
import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import ray
from corpora import START, WORDS, corpus
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from cluster.config import load_settings
from retrieval.article import Hit
from retrieval.build import build_index
from retrieval.client import RetrievalClient
from retrieval.encoder import HashingEncoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.pool import RetrievalPool, start_retrieval_pool
from retrieval.shard_metrics import ShardFigures

pytestmark = pytest.mark.ray

PATIENCE_SECONDS = 90.0
"""How long anything may take that must come; nothing is said about how long it does take."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nodes") / "index"
    build_index(corpus(), HashingEncoder(), directory)
    return directory


Asked = tuple[str, dt.date | None, dt.date, int]


def questions(seed: int) -> list[Asked]:
    draw = random.Random(seed)
    made: list[Asked] = []
    for a, b in combinations(WORDS, 2):
        cutoff = START.date() + dt.timedelta(days=draw.randrange(-1, 70))
        first = None if draw.random() < 0.5 else cutoff - dt.timedelta(days=draw.randrange(30))
        made.append((f"{a} {b}", first, cutoff, draw.randrange(1, 9)))
    return made


class Load:
    """Callers that ask one question after the other until they are told to stop."""

    def __init__(self, client: RetrievalClient, local: LocalSearcher, callers: int) -> None:
        self._client, self._callers = client, callers
        self._questions = questions(11)
        self._expected = [asyncio.run(local.search(*question)) for question in self._questions]
        self.answered = 0
        self._over = False

    async def _caller(self, number: int) -> None:
        draw = random.Random(number)
        while not self._over:
            i = draw.randrange(len(self._questions))
            found: tuple[Hit, ...] = await self._client.search(*self._questions[i])
            assert found == self._expected[i]
            self.answered += 1

    async def during(self, *blows: Any) -> None:
        """Every blow falls under load, and load goes on behind it."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._callers):
                group.create_task(self._caller(number))
            for blow in blows:
                await self._progress(50)
                await asyncio.to_thread(blow)
            await self._progress(200)
            self._over = True

    async def _progress(self, more: int) -> None:
        wanted = self.answered + more
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.answered < wanted:
                await asyncio.sleep(0.05)


def settled(pool: RetrievalPool) -> tuple[ShardFigures, ...]:
    """Of all actors, once all are up again."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return pool.figures()
        except RayError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def where(pool: RetrievalPool) -> dict[tuple[int, int], str]:
    return {(f.group, f.replica): f.node for f in settled(pool)}


def apart(placed: dict[tuple[int, int], str]) -> bool:
    """Whether two replicas of both groups lie on different nodes."""
    return len(placed) == 4 and all(placed[group, 0] != placed[group, 1] for group in (0, 1))


def test_actors_and_a_node_die_under_load_and_every_query_is_answered(cluster: Any, index: Path) -> None:
    overrides = [
        f"index.directory={index}",
        "index.encoder=hashing",
        "retrieval.replicas=2",
        "retrieval.actor_cpus=0.2",
        "retrieval.restarts=9",
        "retrieval.request_timeout_s=60",
    ]
    pool = start_retrieval_pool(load_settings(overrides=overrides))
    try:
        placed = where(pool)
        assert apart(placed)
        load = Load(pool.client(), LocalSearcher(Library.open(index), HashingEncoder()), 8)
        first, second = pool.processes[:2]
        leaving = next(n for n in cluster.worker_nodes if n.node_id in placed.values())

        def one_replica() -> None:
            os.kill(first, signal.SIGKILL)

        def all_replicas() -> None:
            for figures in settled(pool):
                os.kill(figures.process, signal.SIGKILL)

        def a_node() -> None:
            cluster.remove_node(leaving, allow_graceful=False)

        asyncio.run(load.during(one_replica, lambda: os.kill(second, signal.SIGKILL), all_replicas, a_node))
        assert load.answered >= 400
        moved = where(pool)
        assert leaving.node_id not in moved.values()
        assert apart(moved)
    finally:
        pool.close()
