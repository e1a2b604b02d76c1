"""EncoderServer: a sentence encoder for queries, the body of the encoder actor.

A query that was asked lately, or is being encoded for somebody else, is not encoded again; within a run it keeps its vector, to the
last bit, for as long as it is remembered.
"""

import asyncio
from collections.abc import Sequence
from functools import cached_property, partial

from ray.util.metrics import Counter

from cluster.config import EncoderSettings
from cluster.failures import InfrastructureError
from retrieval.batching import QueueDrain
from retrieval.encoder import Encoder, Vectors, encode_queries, encoder_facts, open_encoder
from retrieval.manifest import EncoderFacts
from retrieval.query_cache import QueryCache

_COUNTERS = {
    "pastcast_queries_known_total": "Queries whose vector was remembered, or on its way for somebody else.",
    "pastcast_queries_encoded_total": "Queries that were encoded.",
}


class EncoderServer:
    """Encodes what queued up together."""

    def __init__(self, name: str, batch_size: int, settings: EncoderSettings) -> None:
        """As `open_encoder`; `name` may be an absolute path. Loads nothing yet, so that a wrong one is an error of a call."""
        self._name, self._batch_size, self._settings = name, batch_size, settings
        self._cache = QueryCache(settings.cached_queries)
        self._drain: QueueDrain[str, Vectors] = QueueDrain(self._encode_together, batch_size, of_all=_of_all)
        self._counters = [Counter(name, description=text) for name, text in _COUNTERS.items()]
        self._counted = [0, 0]

    async def ready(self) -> EncoderFacts:
        """Load the encoder. Raises SettingsError if it is not on this node, InfrastructureError if it cannot be started."""
        return encoder_facts(await asyncio.to_thread(lambda: self._encoder))

    async def encode(self, texts: Sequence[str], seconds: float) -> list[Vectors | BaseException]:
        """float32 [dimension] for each query, or why it has none. Raises TimeoutError after `seconds`."""
        facts = await self.ready()
        async with asyncio.timeout(seconds):
            asked = (self._cache.vector(facts, text, partial(self._drain.submit, text)) for text in texts)
            answers = await asyncio.gather(*asked, return_exceptions=True)
        self._count()
        return list(answers)

    @cached_property
    def _encoder(self) -> Encoder:
        return open_encoder(self._name, self._batch_size, self._settings)

    def _encode_together(self, texts: Sequence[str]) -> list[Vectors]:
        return list(encode_queries(self._encoder, texts))

    def _count(self) -> None:
        for place, sum_ in enumerate((self._cache.hits, self._cache.misses)):
            if more := sum_ - self._counted[place]:  # Ray's counters refuse to count nothing
                self._counters[place].inc(more)
                self._counted[place] = sum_


def _of_all(failure: BaseException) -> bool:
    """A server that is down is not asked anew for each of many queries; one query that it refuses is no fault of the others."""
    return isinstance(failure, InfrastructureError) and failure.reason != "encoder-refuses"
