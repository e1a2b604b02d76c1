"""QueryCache: vectors of queries, each encoded once however many ask for it together, the longest unused forgotten first."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from retrieval.manifest import EncoderFacts
from retrieval.mask import Vectors


class QueryCache:
    """Holds vectors by (encoder, text). Belongs to one event loop."""

    def __init__(self, entries: int) -> None:
        """`entries`: vectors that are kept; 0: none, but those being encoded are still shared."""
        self._entries = entries
        self._known: OrderedDict[tuple[str, str, str], Vectors] = OrderedDict()
        self._coming: dict[tuple[str, str, str], asyncio.Future[Vectors]] = {}
        self.hits = 0
        """Vectors that were there or already on their way."""
        self.misses = 0

    async def vector(self, encoder: EncoderFacts, text: str, encode: Callable[[], Awaitable[Vectors]]) -> Vectors:
        """float32 [dimension], read-only: the vector of this text by this encoder, which `encode` makes where it is not known.

        Raises what `encode` raises, to all who wait for it; it is then tried anew by who asks next.
        """
        key = (encoder.fingerprint, encoder.query_template, text)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            self.hits += 1
            return known
        coming = self._coming.get(key)
        if coming is None:
            self.misses += 1
            # a task of its own: whoever asked first may give up, and the others still wait
            coming = asyncio.ensure_future(encode())
            self._coming[key] = coming
            coming.add_done_callback(lambda made: self._keep(key, made))
        else:
            self.hits += 1
        return await asyncio.shield(coming)

    def __len__(self) -> int:
        return len(self._known)

    def _keep(self, key: tuple[str, str, str], made: "asyncio.Future[Vectors]") -> None:
        del self._coming[key]
        if made.cancelled() or made.exception() is not None or not self._entries:
            return
        vector = made.result().copy()  # a row of a batch would keep the whole batch
        vector.flags.writeable = False
        self._known[key] = vector
        while len(self._known) > self._entries:
            self._known.popitem(last=False)
