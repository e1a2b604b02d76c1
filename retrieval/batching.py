"""QueueDrain: requests that queued up while the last batch ran are answered together by the next one.

A lone request starts at once, and under load the batches grow by themselves. After a batch the next one lingers a moment, but only until
as many requests are there as were answered and left waiting: callers that ask again and again then stay together instead of taking turns
in two halves. A batch that fails is repeated one by one, so that only the request at fault fails.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class QueueDrain(Generic[Request, Answer]):
    """Calls `answer` with a list of requests, in a thread, one call at a time. Belongs to one event loop."""

    def __init__(
        self,
        answer: Callable[[Sequence[Request]], Sequence[Answer]],
        largest: int = 64,
        linger_s: float = 0.0,
        of_all: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        """`answer` returns one answer per request, aligned; `largest`: most requests per call; `of_all`: whether a failure would
        meet each request of a batch alike, so that none of them is repeated."""
        self._answer = answer
        self._largest = largest
        self._linger_s = linger_s
        self._of_all = of_all
        self._waiting: list[tuple[Request, asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._enough = asyncio.Event()
        self._expected = 0

    @property
    def waiting(self) -> int:
        """Requests that no batch has taken yet."""
        return len(self._waiting)

    async def submit(self, request: Request) -> Answer:
        """The answer to one request. Raises what `answer` raises for it."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if len(self._waiting) >= self._expected:
            self._enough.set()
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
                    if not single[1].done():
                        await self._settle([single])
            await self._linger(min(self._largest, len(batch) + len(self._waiting)))

    async def _linger(self, expected: int) -> None:
        if self._linger_s and len(self._waiting) < expected:
            self._expected = expected
            self._enough.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._linger_s):
                    await self._enough.wait()
        self._expected = 0

    async def _settle(self, batch: list[tuple[Request, asyncio.Future[Answer]]]) -> bool:
        """Whether the batch is settled: answered, or a single request that failed."""
        requests = [request for request, _ in batch]
        [outcome] = await asyncio.gather(asyncio.to_thread(self._answer, requests), return_exceptions=True)
        if isinstance(outcome, BaseException):
            if len(batch) > 1 and not self._of_all(outcome):
                return False
            for _, future in batch:
                if not future.done():
                    future.set_exception(outcome)
            return True
        for (_, future), answer in zip(batch, outcome, strict=True):
            if not future.done():
                future.set_result(answer)
        return True
