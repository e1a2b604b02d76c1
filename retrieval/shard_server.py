"""ShardServer: some months of an index, the body of a shard actor.

Its queue is bounded over all who call it: a query that finds it full waits at the door in order of arrival, within its deadline, and
`GroupCaller` keeps few calls there. What waits in the queue is searched together. A query that its caller gave up is not searched.
"""

import asyncio
import os
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import ray

from cluster.clock import monotonic
from cluster.config import Device
from cluster.failures import DataError, InfrastructureError, PastcastError
from cluster.record import Record
from retrieval.article import Article
from retrieval.batching import QueueDrain
from retrieval.manifest import ShardManifest
from retrieval.remote_index import RemoteIndex
from retrieval.scan import Asked, Told, answers, check_asked
from retrieval.shard_files import StoredShard, load_shard
from retrieval.shard_metrics import ShardFigures, ShardMetrics, Work


class Serving(Record):
    """What a shard actor serves, and how."""

    index: str
    """Fingerprint."""
    directory: Path
    """Absolute: the index, or where this node keeps what it fetches of `source`."""
    source: str | None = None
    """fsspec address of the index; None: it lies in `directory`."""
    shards: tuple[ShardManifest, ...]
    """From the driver, so that an actor that starts again serves the same bytes or none."""
    group: int = 0
    replica: int = 0
    snippet_characters: int = 280
    device: Device = "cpu"
    batch: int = 64
    """Most queries that are searched together."""
    linger_s: float = 0.0
    """See `QueueDrain`."""
    queue: int = 256
    """Most queries that are let in at once, those that are searched included."""


class ShardServer:
    """Searches and reads its months."""

    def __init__(self, serving: Serving) -> None:
        """Opens nothing yet, so that a damaged shard is a DataError of a call and not an actor without a reason."""
        self._serving = serving
        self._opening = threading.Lock()
        self._shards: dict[str, StoredShard] = {}
        self._drain = QueueDrain(self._search_together, serving.batch, serving.linger_s, _of_machine)
        self._door = asyncio.Semaphore(serving.queue)
        self._inside = self._longest = 0
        self._metrics = ShardMetrics(serving.index, serving.group, serving.replica)

    async def ready(self) -> int:
        """Open the shards. The id of the process that holds them.

        Raises DataError for a damaged one, InfrastructureError where they have to be fetched and cannot.
        """
        if not self._shards:
            await asyncio.to_thread(self._open)
        return os.getpid()

    async def search(self, queries: Sequence[Asked], seconds: float) -> list[Told | Exception]:
        """For each query the best k hits of these months, best first, or what they count, or what was wrong with it.

        `seconds`: after them nobody waits any more. Raises as `ready` does.
        """
        await self.ready()
        told = await asyncio.gather(*(self._answer(q, seconds) for q in queries), return_exceptions=True)
        return [_portable(answer) if isinstance(answer, BaseException) else answer for answer in told]

    async def fetch(self, ids: Sequence[str], seconds: float) -> list[Article | None]:
        """The article with each id, if these months hold it. Raises as `ready` does."""
        await self.ready()
        async with asyncio.timeout(seconds):
            return await asyncio.to_thread(lambda: [self._find(article_id) for article_id in ids])

    async def figures(self) -> ShardFigures:
        """What it did since it was started."""
        return ShardFigures(
            group=self._serving.group,
            replica=self._serving.replica,
            node=ray.get_runtime_context().get_node_id(),
            process=os.getpid(),
            waiting=self._drain.waiting,
            longest_queue=self._longest,
            work=self._metrics.sum,
        )

    async def _answer(self, query: Asked, seconds: float) -> Told:
        check_asked(query, self._serving.shards[0].encoder.dimension)
        async with asyncio.timeout(seconds), self._door:
            self._inside += 1
            self._longest = max(self._longest, self._inside)
            try:
                return await self._drain.submit(query)
            finally:
                self._inside -= 1

    def _search_together(self, queries: Sequence[Asked]) -> list[Told]:
        before, began = self._counted(), monotonic()
        told = answers(self._shards, queries, self._serving.snippet_characters)
        after = self._counted()
        batch = Work(
            queries=len(queries),
            batches=1,
            rows=after.rows - before.rows,
            seconds=monotonic() - began,
            fallbacks=after.fallbacks - before.fallbacks,
        )
        self._metrics.searched(batch, self._drain.waiting)
        return told

    def _counted(self) -> Work:
        counts = [stored.shard.counts for stored in self._shards.values()]
        return Work(rows=sum(c.ranged for c in counts), fallbacks=sum(c.fallbacks for c in counts))

    def _find(self, article_id: str) -> Article | None:
        found = (shard.fetch(article_id) for shard in self._shards.values())
        return next((article for article in found if article is not None), None)

    def _open(self) -> None:
        serving = self._serving
        with self._opening:
            if self._shards:
                return
            if serving.source is None:
                self._shards = {s.month: load_shard(serving.directory, s, serving.device) for s in serving.shards}
            else:
                remote = RemoteIndex(serving.source, serving.directory)
                self._shards = {s.month: self._fetched(remote, s) for s in serving.shards}

    def _fetched(self, remote: RemoteIndex, shard: ShardManifest) -> StoredShard:
        folder = remote.fetch(self._serving.index, [shard])
        try:
            return load_shard(folder, shard, self._serving.device)
        except DataError:
            # what this node kept has been damaged since; the index itself may be sound
            remote.discard(self._serving.index, shard)
            return load_shard(remote.fetch(self._serving.index, [shard]), shard, self._serving.device)


def _of_machine(failure: BaseException) -> bool:
    """Whether a failure would meet each query of a batch: one of them alone may be searched in another way, and pass."""
    return isinstance(failure, InfrastructureError)


def _portable(error: BaseException) -> Exception:
    """An error that can be sent, whatever it holds."""
    if isinstance(error, (PastcastError, ValueError, TypeError, TimeoutError)):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))
