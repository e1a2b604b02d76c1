"""A gate before something that is now and then replaced while it is in use.

Users pass through under a key. Whoever closes keys waits until the last user of them has left; users who come
meanwhile wait outside. Made and used in one event loop.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable


class Gate:
    """Open for every key at first."""

    def __init__(self) -> None:
        self._inside: Counter[str] = Counter()
        self._closed: list[str | None] = []
        self._waiting: list[asyncio.Future[None]] = []

    @contextlib.asynccontextmanager
    async def passing(self, key: str) -> AsyncIterator[None]:
        """Use what lies behind the gate; waits while `key` is closed."""
        await self._until(lambda: key not in self._closed and None not in self._closed)
        self._inside[key] += 1
        try:
            yield
        finally:
            self._inside[key] -= 1
            self._wake()

    @contextlib.asynccontextmanager
    async def closed(self, key: str | None = None) -> AsyncIterator[None]:
        """Alone with what lies behind `key` (None: behind every key); one at a time, in order of arrival for each key."""
        await self._until(lambda: not self._closed)
        self._closed.append(key)
        try:
            await self._until(lambda: not (self._inside.total() if key is None else self._inside[key]))
            yield
        finally:
            self._closed.remove(key)
            self._wake()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)
