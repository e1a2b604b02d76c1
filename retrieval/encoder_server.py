"""EncoderServer: a sentence encoder for queries, the body of the encoder actor."""

import asyncio
from collections.abc import Sequence
from functools import cached_property

from retrieval.batching import QueueDrain
from retrieval.encoder import Encoder, Vectors, open_encoder


class EncoderServer:
    """Encodes what queued up together."""

    def __init__(self, name: str, batch_size: int) -> None:
        """`name` as in `open_encoder`, or an absolute path."""
        self._name = name
        self._batch_size = batch_size
        self._drain: QueueDrain[str, Vectors] = QueueDrain(self._encode_together, batch_size)

    async def ready(self) -> tuple[str, str]:
        """Load the encoder. Its name and fingerprint. Raises SettingsError if it is not on this node."""
        encoder = await asyncio.to_thread(lambda: self._encoder)
        return encoder.name, encoder.fingerprint

    async def encode(self, texts: Sequence[str], seconds: float) -> list[Vectors]:
        """float32 [dimension] for each text. Raises TimeoutError after `seconds`."""
        await self.ready()
        async with asyncio.timeout(seconds):
            return list(await asyncio.gather(*(self._drain.submit(text) for text in texts)))

    @cached_property
    def _encoder(self) -> Encoder:
        return open_encoder(self._name, self._batch_size)

    def _encode_together(self, texts: Sequence[str]) -> list[Vectors]:
        # equal queries arrive together when repetitions of one step run side by side
        distinct = list(dict.fromkeys(texts))
        vectors = dict(zip(distinct, self._encoder.encode(distinct), strict=True))
        return [vectors[text] for text in texts]
