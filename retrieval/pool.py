"""The index served by Ray actors: shards dealt among some, one that encodes queries, and a client that merges.

Queries that queue up at an actor are answered together. An actor that dies is started again and its pending queries
wait for it; when that takes longer than the deadline, or it died too often, the caller gets an InfrastructureError. A
missing part never looks like an empty result. The answers are those of `LocalSearcher`, up to the last bits of a query
vector that a sentence encoder gives in another batch.
"""

import asyncio
import datetime as dt
import logging
import os
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from cluster.config import Device, Settings
from cluster.failures import InfrastructureError, PastcastError
from cluster.home import model_path
from retrieval.article import Article, Hit
from retrieval.batching import QueueDrain
from retrieval.build import index_kind
from retrieval.days import require_day
from retrieval.encoder import HASHING, Encoder, Vectors, encodable, open_encoder
from retrieval.library import Library
from retrieval.local import require_encoder
from retrieval.manifest import Manifest, ShardManifest
from retrieval.mask import check_k, check_queries
from retrieval.scan import Query, Span, deal, merge, search_shards
from retrieval.shard_files import StoredShard, load_shard

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class ShardServer:
    """Some months of an index: the body of a shard actor."""

    def __init__(
        self, directory: Path, shards: tuple[ShardManifest, ...], snippet_characters: int, device: Device = "cpu"
    ) -> None:
        """Opens nothing yet, so that a damaged shard is a DataError of a call and not an actor without a reason.

        The shards' manifests come from the driver: an actor that starts again serves the same bytes or none.
        """
        self._directory = directory
        self._manifests = shards
        self._snippet_characters = snippet_characters
        self._device = device
        self._drain = QueueDrain(self._search_together)

    async def ready(self) -> int:
        """Open the shards. The id of the process that holds them. Raises DataError for a damaged one."""
        await asyncio.to_thread(lambda: self._shards)
        return os.getpid()

    async def search(self, vector: Vectors, first_day: dt.date | None, cutoff: dt.date, k: int) -> list[Hit]:
        """The best k hits of these months, best first."""
        dimension = self._manifests[0].encoder.dimension
        check_queries(vector[None, :], dimension)
        check_k(k)
        return await self._drain.submit(Query(vector, first_day, cutoff, k))

    async def fetch(self, article_id: str) -> Article | None:
        """The article with this id, if these months hold it."""
        shards = await asyncio.to_thread(lambda: self._shards)
        found = (shard.fetch(article_id) for shard in shards.values())
        return next((article for article in found if article is not None), None)

    @cached_property
    def _shards(self) -> dict[str, StoredShard]:
        return {s.month: load_shard(self._directory, s, self._device) for s in self._manifests}

    def _search_together(self, queries: Sequence[Query]) -> list[list[Hit]]:
        return search_shards(self._shards, queries, self._snippet_characters)


class EncoderServer:
    """A sentence encoder for queries: the body of the encoder actor."""

    def __init__(self, name: str, batch_size: int) -> None:
        """`name` as in `open_encoder`, or an absolute path."""
        self._name = name
        self._batch_size = batch_size
        self._drain: QueueDrain[str, Vectors] = QueueDrain(self._encode_together, batch_size)

    async def ready(self) -> tuple[str, str]:
        """Load the encoder. Its name and fingerprint. Raises SettingsError if it is not on this node."""
        encoder = await asyncio.to_thread(lambda: self._encoder)
        return encoder.name, encoder.fingerprint

    async def encode(self, text: str) -> Vectors:
        """float32 [dimension]."""
        return await self._drain.submit(text)

    @cached_property
    def _encoder(self) -> Encoder:
        return open_encoder(self._name, self._batch_size)

    def _encode_together(self, texts: Sequence[str]) -> list[Vectors]:
        # equal queries arrive together when repetitions of one step run side by side
        distinct = list(dict.fromkeys(texts))
        vectors = dict(zip(distinct, self._encoder.encode(distinct), strict=True))
        return [vectors[text] for text in texts]


@dataclass(frozen=True)
class ShardActor:
    """A handle and the days it can answer for."""

    handle: Any
    """Ray actor handle of a ShardServer."""
    span: Span


class RetrievalClient:
    """Implements `Searcher` over the actors. Can be sent to any process of the Ray session."""

    def __init__(self, encoder: Any, shards: tuple[ShardActor, ...], timeout_s: float) -> None:
        """`encoder`: Ray actor handle of an EncoderServer; `timeout_s`: deadline of one search or fetch."""
        self._encoder = encoder
        self._shards = shards
        self._timeout_s = timeout_s

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        """See `Searcher`. Raises InfrastructureError `retrieval-lost`, or `retrieval-gone` where no repetition helps."""
        check_k(top_k)
        require_day(cutoff, "a cutoff")
        asked = [shard.handle for shard in self._shards if shard.span.meets(first_day, cutoff)]
        if not asked:
            return ()
        return await self._within_deadline(self._ask(asked, encodable(query), first_day, cutoff, top_k))

    async def fetch(self, article_id: str) -> Article | None:
        """See `Searcher`. Raises InfrastructureError `retrieval-lost`, or `retrieval-gone` where no repetition helps."""
        if encodable(article_id) != article_id:
            return None  # no stored id is like that, and it cannot be sent
        return await self._within_deadline(self._find(article_id))

    async def _ask(
        self, handles: Sequence[Any], query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int
    ) -> tuple[Hit, ...]:
        vector = await self._encoder.encode.remote(query)
        lists = await asyncio.gather(*(h.search.remote(vector, first_day, cutoff, top_k) for h in handles))
        return tuple(merge((hit for hits in lists for hit in hits), top_k))

    async def _find(self, article_id: str) -> Article | None:
        found = await asyncio.gather(*(shard.handle.fetch.remote(article_id) for shard in self._shards))
        return next((article for article in found if article is not None), None)

    async def _within_deadline(self, answer: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as error:
            raise InfrastructureError("retrieval-lost", f"no answer within {self._timeout_s:g} s") from error
        except RayTaskError as error:
            if isinstance(error.cause, PastcastError):
                # only an actor that started again opens files: what it finds there is a fault of the place, not of the query
                raise InfrastructureError("retrieval-gone", str(error.cause)) from error
            raise  # an unknown error inside an actor is a bug, and loud
        except ActorDiedError as error:
            # Calls wait for a restart; this one says that none is left.
            raise InfrastructureError("retrieval-gone", f"{type(error).__name__}: {error}") from error
        except RayError as error:
            raise InfrastructureError("retrieval-lost", f"{type(error).__name__}: {error}") from error


class RetrievalPool:
    """The actors that one process started."""

    def __init__(self, encoder: Any, shards: tuple[ShardActor, ...], timeout_s: float, manifest: Manifest) -> None:
        self._encoder = encoder
        self._shards = shards
        self._timeout_s = timeout_s
        self.manifest = manifest
        self.processes: tuple[int, ...] = ()
        """Ids of the processes that held the shards when the pool became ready, one per shard actor."""

    def client(self) -> RetrievalClient:
        """A searcher over these actors."""
        return RetrievalClient(self._encoder, self._shards, self._timeout_s)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when all shards are open and the encoder is loaded and is the index's.

        Raises InfrastructureError if that takes longer, DataError for a damaged shard, SettingsError for a wrong encoder.
        """
        handles = [self._encoder, *(shard.handle for shard in self._shards)]
        try:
            (name, fingerprint), *processes = ray.get([h.ready.remote() for h in handles], timeout=timeout_s)
        except GetTimeoutError as error:
            raise InfrastructureError(
                "retrieval-start",
                f"{len(handles)} retrieval actors are not up after {timeout_s:g} s; free in the session: "
                f"{ray.available_resources()}; lower retrieval.shard_actors or retrieval.actor_cpus, or add CPUs",
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, PastcastError):
                raise error.cause from error
            raise
        except RayError as error:
            raise InfrastructureError("retrieval-start", f"{type(error).__name__}: {error}") from error
        require_encoder(self.manifest.encoder, name, fingerprint)
        self.processes = tuple(processes)

    def close(self) -> None:
        """End the actors of this pool, and nothing else."""
        for handle in (self._encoder, *(shard.handle for shard in self._shards)):
            ray.kill(handle)


def start_retrieval_pool(settings: Settings) -> RetrievalPool:
    """Serve `index.directory` in the Ray session that this process has joined; every node must see the directory.

    Raises DataError for a missing or damaged index, SettingsError for another encoder or kind than the index's, InfrastructureError if the
    actors do not start in time.
    """
    if not ray.is_initialized():
        raise InfrastructureError("retrieval-start", "there is no Ray session; start or join one first")
    library = Library.open(settings.index.directory.resolve())
    library.require_kind(index_kind(settings.index))
    retrieval, manifest = settings.retrieval, library.manifest
    options = {
        "num_cpus": retrieval.actor_cpus,
        "max_restarts": retrieval.restarts,
        "max_task_retries": retrieval.restarts,
    }
    by_month = {s.month: s for s in manifest.shards}
    shard_class = ray.remote(**options, num_gpus=retrieval.actor_gpus)(ShardServer)
    encoder_class = ray.remote(**options)(EncoderServer)
    shards = []
    for months in deal(manifest.shards, retrieval.shard_actors):
        mine = tuple(by_month[month] for month in months)
        handle = shard_class.remote(library.directory, mine, retrieval.snippet_characters, retrieval.device)
        shards.append(ShardActor(handle, Span.of(mine)))
    encoder_name = settings.index.encoder
    located = encoder_name if encoder_name == HASHING else str(model_path(encoder_name).resolve())
    encoder = encoder_class.remote(located, settings.index.batch_size)
    pool = RetrievalPool(encoder, tuple(shards), retrieval.request_timeout_s, manifest)
    with ExitStack() as undo:
        undo.callback(pool.close)
        pool.wait_until_ready(retrieval.start_timeout_s)
        undo.pop_all()
    _log.info("retrieval: %d articles of %d months on %d actors", library.rows, len(manifest.shards), len(shards))
    return pool
