"""The retrieval pool under concurrent callers, beside an actor that answers one query at a time.

Both search the same index on disk with the same cores and code, in one Ray session; they take turns, round after round. Queries are vectors
that were made before, so that no encoder is measured. A caller asks its next query when it has the answer to the last one.
"""

import asyncio
import datetime as dt
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import ray
from rich.table import Table

from cluster.config import load_settings
from cluster.record import Record
from retrieval.article import Article, Hit
from retrieval.encoder import Vectors
from retrieval.index_folder import publish
from retrieval.library import Library
from retrieval.manifest import EXACT, EncoderIdentity, IndexKind, ShardManifest
from retrieval.pool import RetrievalPool, start_pool
from retrieval.scan import Query, search_shards
from retrieval.shard_files import HALF, StoredShard, month_of, write_shard
from retrieval.shard_metrics import Work
from retrieval.workers import granted_cores

Kind = Literal["exact", "exact-bf16"]

CALLERS = (1, 8, 32, 128)

_BOTH = IndexKind(name="exact-bf16")

_MONTH_ROWS = 100_000
_DAYS = 28
_FIRST_MONTH = dt.date(2020, 1, 1)


class PoolResult(Record):
    """The pool with so many callers at once, and the peer with as many. Medians over the rounds."""

    kind: Kind
    """How both search."""
    callers: int
    queries_per_s: float
    p50_ms: float
    """Of one query, from asking to answer."""
    p95_ms: float
    mean_batch: float
    """Queries that the shard actor searched together."""
    one_at_a_time_queries_per_s: float
    one_at_a_time_p50_ms: float
    speedup: float
    """Queries per second of the pool over those of the peer in the same round."""


class Turn(Record):
    """One of them, asked by so many callers for a while."""

    queries_per_s: float
    p50_ms: float
    p95_ms: float


class OneAtATime:
    """The peer: an actor with the same shards and cores that answers each call by itself, as a plain search service does."""

    def __init__(self, library: Library) -> None:
        self._shards: dict[str, StoredShard] = library.load()

    def search(self, vector: Vectors, first_day: dt.date | None, cutoff: dt.date, k: int) -> list[Hit]:
        """The best k hits."""
        return search_shards(self._shards, [Query(vector, first_day, cutoff, k)], 280)[0]


Ask = Callable[[Query], Awaitable[Any]]


def make_index(directory: Path, rows: int, dim: int, seed: int) -> list[dt.date]:
    """Random unit vectors under short articles, as an index with a half-precision copy; the days on which there are any."""
    random = np.random.default_rng(seed)
    encoder = EncoderIdentity(name="random", fingerprint="none", dimension=dim, text_characters=1_000)
    directory.mkdir(parents=True)
    shards: list[ShardManifest] = []
    days: set[dt.date] = set()
    for number, start in enumerate(range(0, rows, _MONTH_ROWS)):
        count = min(_MONTH_ROWS, rows - start)
        first = _FIRST_MONTH.replace(year=2020 + number // 12, month=1 + number % 12)
        drawn = random.standard_normal((count, dim), dtype=np.float32)
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
        articles = [_article(start + i, first + dt.timedelta(days=i * _DAYS // count)) for i in range(count)]
        days |= {articles[i].day for i in range(0, count, max(1, count // 100))}
        shards.append(write_shard(directory, month_of(first), articles, drawn, encoder, _BOTH))
    publish(directory, encoder, _BOTH, shards)
    return sorted(days)


def opened_as(directory: Path, kind: Kind) -> Library:
    """The index as one of this kind: without its half-precision copy it is an exact one."""
    library = Library.open(directory)
    if kind == "exact-bf16":
        return library
    without = {"kind": EXACT}
    shards = tuple(
        s.model_copy(update={**without, "files": {name: h for name, h in s.files.items() if name != HALF}})
        for s in library.manifest.shards
    )
    return Library(directory, library.manifest.model_copy(update={**without, "shards": shards}))


def _article(number: int, day: dt.date) -> Article:
    return Article(
        id=f"a{number:09}",
        url=f"https://example.org/{number}",
        title=f"Article {number}",
        summary="",
        text="Nothing of interest happened.",
        published=dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC),
        date_source="published",
        source="Example",
    )


def make_queries(days: Sequence[dt.date], dim: int, cutoffs: str, k: int, seed: int, count: int = 512) -> list[Query]:
    """Random unit vectors with cutoffs as the first part of the benchmark has them."""
    random = np.random.default_rng(seed + 1)
    vectors = random.standard_normal((count, dim), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    chosen = list(days) if cutoffs == "random" else [days[-1]]
    if cutoffs == "days8":
        chosen = [days[i] for i in random.integers(0, len(days), 8)]
    ends = random.integers(0, len(chosen), count)
    return [Query(vector, None, chosen[end], k) for vector, end in zip(vectors, ends, strict=True)]


async def _turn(ask: Ask, queries: Sequence[Query], callers: int, seconds: float) -> Turn:
    """Queries that were asked before the time was over count; every caller waits for its last answer."""
    clock = time.perf_counter
    took: list[float] = []
    began = clock()

    async def caller(number: int) -> None:
        for i in itertools.count(number, callers):
            asked = clock()
            if asked - began >= seconds:
                return
            await ask(queries[i % len(queries)])
            took.append(clock() - asked)

    await asyncio.gather(*(caller(number) for number in range(callers)))
    p50, p95 = np.percentile(took, [50, 95])
    return Turn(queries_per_s=len(took) / (clock() - began), p50_ms=1e3 * float(p50), p95_ms=1e3 * float(p95))


def _compare(
    kind: Kind,
    pool: RetrievalPool,
    peer: Any,
    queries: Sequence[Query],
    callers: Sequence[int],
    rounds: int,
    seconds: float,
) -> list[PoolResult]:
    client = pool.client()

    async def ours(query: Query) -> None:
        await client.nearest(query.vector, query.first_day, query.cutoff, query.k)

    async def theirs(query: Query) -> None:
        await peer.search.remote(query.vector, query.first_day, query.cutoff, query.k)

    def work() -> Work:
        return sum((figures.work for figures in pool.figures()), Work())

    made: dict[int, list[tuple[Turn, Turn, float]]] = {n: [] for n in callers}
    for ask in (ours, theirs):
        asyncio.run(_turn(ask, queries, 8, min(seconds, 1.0)))  # pages are mapped and threads started
    for _ in range(rounds):
        for n in callers:
            before = work()
            mine = asyncio.run(_turn(ours, queries, n, seconds))
            batch = (work() - before).mean_batch
            made[n].append((mine, asyncio.run(_turn(theirs, queries, n, seconds)), batch))
    return [_result(kind, n, turns) for n, turns in made.items()]


def _result(kind: Kind, callers: int, turns: Sequence[tuple[Turn, Turn, float]]) -> PoolResult:
    def median(values: Sequence[float]) -> float:
        return float(np.median(values))

    return PoolResult(
        kind=kind,
        callers=callers,
        queries_per_s=median([mine.queries_per_s for mine, _, _ in turns]),
        p50_ms=median([mine.p50_ms for mine, _, _ in turns]),
        p95_ms=median([mine.p95_ms for mine, _, _ in turns]),
        mean_batch=median([batch for _, _, batch in turns]),
        one_at_a_time_queries_per_s=median([theirs.queries_per_s for _, theirs, _ in turns]),
        one_at_a_time_p50_ms=median([theirs.p50_ms for _, theirs, _ in turns]),
        speedup=median([mine.queries_per_s / theirs.queries_per_s for mine, theirs, _ in turns]),
    )


def pool_results(
    rows: int,
    dim: int,
    *,
    kinds: Sequence[Kind] = get_args(Kind),
    cutoffs: str,
    k: int,
    callers: Sequence[int] = CALLERS,
    rounds: int,
    seconds: float,
    seed: int,
    data: Path | None = None,
) -> list[PoolResult]:
    """One per number of callers. Starts a Ray session of its own and ends it. `seconds`: of a turn; `data`: where the index is made."""
    cores = granted_cores()
    with tempfile.TemporaryDirectory(prefix="bench-pool-", dir=data) as name:
        directory = Path(name) / "index"
        queries = make_queries(make_index(directory, rows, dim, seed), dim, cutoffs, k, seed)
        overrides = [
            f"index.directory={directory}",
            "retrieval.shard_actors=1",
            f"retrieval.actor_cpus={cores}",
        ]
        ray.init(address="local", num_cpus=2 * cores, include_dashboard=False, log_to_driver=False)
        made: list[PoolResult] = []
        try:
            for kind in kinds:
                library = opened_as(directory, kind)
                pool = start_pool(library, load_settings(overrides=overrides), None)
                peer = ray.remote(OneAtATime).options(num_cpus=cores, max_concurrency=1).remote(library)
                made += _compare(kind, pool, peer, queries, callers, rounds, seconds)
                pool.close()
                ray.kill(peer)
            return made
        finally:
            ray.shutdown()


def pool_table(results: Sequence[PoolResult]) -> Table:
    """For people."""
    table = Table(
        title="the Ray pool: a shard actor under concurrent callers, and one that answers one query at a time"
    )
    table.add_column("kind")
    for column in ("callers", "queries/s", "p50 ms", "p95 ms", "mean batch", "one at a time: queries/s", "p50 ms", "×"):
        table.add_column(column, justify="right")
    for r in results:
        ours = (f"{r.queries_per_s:.0f}", f"{r.p50_ms:.1f}", f"{r.p95_ms:.1f}", f"{r.mean_batch:.1f}")
        theirs = (f"{r.one_at_a_time_queries_per_s:.0f}", f"{r.one_at_a_time_p50_ms:.1f}", f"{r.speedup:.1f}")
        table.add_row(r.kind, str(r.callers), *ours, *theirs)
    return table
