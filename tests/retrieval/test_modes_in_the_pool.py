"""Lexical and hybrid search through the Ray pool: the answers of the local searcher, whatever dies, and nothing counted after the cutoff.

One session serves the whole module; the months of the corpus lie on two actors, so that counts have to be added up.
"""

import asyncio
import datetime as dt
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from corpora import START, WORDS, article, corpus

from cluster.config import Settings, load_settings
from cluster.failures import SettingsError
from retrieval.article import Hit
from retrieval.build import build_index
from retrieval.client import RetrievalClient
from retrieval.encoder import HashingEncoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.pool import RetrievalPool, start_retrieval_pool
from retrieval.view import DatedView

pytestmark = pytest.mark.ray

FIRST = START.date()
CUTOFF = FIRST + dt.timedelta(days=30)
QUERY = "ballot flood tariff"


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What was visible at CUTOFF, and the whole: there a word that was rare becomes the commonest, before and after."""
    folder = tmp_path_factory.mktemp("indexes")
    seen = [a for a in corpus() if FIRST <= a.day <= CUTOFF]
    seen.append(article("flood", START + dt.timedelta(days=9), "flood ballot"))
    unseen = [a for a in corpus() if a.day > CUTOFF]
    for i in range(150):
        day = START + (dt.timedelta(days=31 + i % 20) if i % 2 else -dt.timedelta(days=1 + i % 20))
        unseen.append(article(f"z{i:03}", day, "flood flood", "flood tariff"))
    build_index(seen, HashingEncoder(), folder / "alone")
    build_index([*seen, *unseen], HashingEncoder(), folder / "whole")
    return {"alone": folder / "alone", "whole": folder / "whole"}


def settings_for(index: Path, mode: str, *overrides: str) -> Settings:
    return load_settings(
        overrides=[f"index.directory={index}", "index.encoder=hashing", f"search.mode={mode}", *overrides]
    )


def local(settings: Settings) -> LocalSearcher:
    return LocalSearcher(Library.open(settings.index.directory), HashingEncoder(), search=settings.search)


def questions() -> list[tuple[str, dt.date | None, dt.date, int]]:
    draw = random.Random(4)
    asked = []
    for _ in range(60):
        words = " ".join(draw.sample([*WORDS, "flood", "unheard", "!?"], draw.randrange(4)))
        cutoff = FIRST + dt.timedelta(days=draw.randrange(-25, 70))
        first = draw.choice([None, cutoff - dt.timedelta(days=draw.randrange(40))])
        asked.append((words, first, cutoff, draw.choice([1, 3, 12, 40])))
    return [*asked, ("\ud800 flood", None, CUTOFF, 3), ("ballot " * 3000, None, CUTOFF, 3)]


async def ask(searcher: RetrievalClient | LocalSearcher) -> list[tuple[Hit, ...]]:
    """All at once, so that counts, words and vectors of several searches share a batch."""
    return list(await asyncio.gather(*(searcher.search(*question) for question in questions())))


@pytest.mark.parametrize("mode", ["lexical", "hybrid"])
def test_the_pool_answers_like_the_local_searcher_also_after_an_actor_was_killed(
    indexes: dict[str, Path], mode: str
) -> None:
    settings = settings_for(indexes["whole"], mode)
    expected = asyncio.run(ask(local(settings)))
    assert sum(map(len, expected)) > 100
    pool = start_retrieval_pool(settings)
    try:
        assert len(pool.processes) == 2
        client = pool.client()
        assert asyncio.run(ask(client)) == expected
        os.kill(pool.processes[0], signal.SIGKILL)
        assert asyncio.run(ask(client)) == expected
        sent = ray.get(ask_elsewhere.remote(client))
        assert sent == asyncio.run(DatedView(local(settings), CUTOFF).search(QUERY, 5))
        leaks_nothing(pool, settings_for(indexes["alone"], mode))
        for k in (0, 1001):
            with pytest.raises(ValueError, match="top k"):
                asyncio.run(client.search("flood", None, CUTOFF, k))
    finally:
        pool.close()


@ray.remote(num_cpus=0)
def ask_elsewhere(client: RetrievalClient) -> tuple[Hit, ...]:
    return asyncio.run(DatedView(client, CUTOFF).search(QUERY, 5))


def leaks_nothing(pool: RetrievalPool, alone: Settings) -> None:
    """A word that is frequent only after the cutoff, and before the first day, moves nothing between the two."""
    before = asyncio.run(local(alone).search(QUERY, FIRST, CUTOFF, 40))
    assert asyncio.run(pool.client().search(QUERY, FIRST, CUTOFF, 40)) == before
    assert "flood" in {h.article_id for h in before[:3]}, "it is rare, and weighs most"
    later = asyncio.run(pool.client().search(QUERY, None, CUTOFF + dt.timedelta(days=30), 200))
    common = {h.article_id for h in before}
    assert [h.article_id for h in later if h.article_id in common] != [h.article_id for h in before]


def test_a_pool_that_ranks_by_words_has_no_encoder(indexes: dict[str, Path]) -> None:
    pool = start_retrieval_pool(settings_for(indexes["alone"], "lexical", "index.encoder=no-such-encoder"))
    try:
        assert asyncio.run(pool.client().search("flood", None, CUTOFF, 3))[0].article_id == "flood"
    finally:
        pool.close()


def test_a_pool_does_not_start_on_an_index_without_postings(tmp_path: Path) -> None:
    build_index(corpus(), HashingEncoder(), tmp_path, lexical=False)
    with pytest.raises(SettingsError, match=r"search\.mode hybrid needs; set index\.lexical: true"):
        start_retrieval_pool(settings_for(tmp_path, "hybrid"))
