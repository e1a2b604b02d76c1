"""QueueDrain: requests that queued up while the last batch ran are answered together by the next one.

No timer: a lone request starts at once, and under load the batches grow by themselves. A batch that fails is
repeated one by one, so that only the request at fault fails.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class QueueDrain(Generic[Request, Answer]):
    """Calls `answer` with a list of requests, in a thread, one call at a time. Belongs to one event loop."""

    def __init__(self, answer: Callable[[Sequence[Request]], Sequence[Answer]], largest: int = 64) -> None:
        """`answer` returns one answer per request, aligned; `largest`: most requests per call."""
        self._answer = answer
        self._largest = largest
        self._waiting: list[tuple[Request, asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Answer:
        """The answer to one request. Raises what `answer` raises for it."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._largest], self._waiting[self._largest :]
            # whoever gave up waiting has cancelled its future
            batch = [(request, future) for request, future in batch if not future.done()]
            if batch and not await self._settle(batch):
                for single in batch:
                    await self._settle([single])

    async def _settle(self, batch: list[tuple[Request, asyncio.Future[Answer]]]) -> bool:
        """Whether the batch is settled: answered, or a single request that failed."""
        requests = [request for request, _ in batch]
        [outcome] = await asyncio.gather(asyncio.to_thread(self._answer, requests), return_exceptions=True)
        if isinstance(outcome, BaseException):
            if len(batch) > 1:
                return False
            if not batch[0][1].done():
                batch[0][1].set_exception(outcome)
            return True
        for (_, future), answer in zip(batch, outcome, strict=True):
            if not future.done():
                future.set_result(answer)
        return True
