"""RemoteEncoder: a model behind an OpenAI-compatible `/v1/embeddings`, within the limits that `encoder.server` sets for one process.

Vectors are normalized here, and nothing but one vector of the stated dimension for each text is accepted. The server's address
is not part of the encoder's identity: the same model may move.
"""

import asyncio
import datetime as dt
import hashlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cluster.clock import utc_now
from cluster.config import EncoderSettings
from cluster.endpoint.attempts import Attempts
from cluster.endpoint.embeddings import embeddings_of, tokens_of
from cluster.endpoint.gatekeeper import Gatekeeper, read_keys
from cluster.endpoint.transport import EMBEDDINGS, Transport
from cluster.failures import InfrastructureError, SettingsError
from retrieval.encoder import encodable
from retrieval.manifest import EncoderFacts
from retrieval.mask import Vectors

LONGEST_TEXT = 16_000
"""Characters of a text that are sent: a model may write a query that no server takes."""

Result = TypeVar("Result")


def remote_facts(model: str, settings: EncoderSettings) -> EncoderFacts:
    """Model, dimension and instruction. Raises SettingsError without a dimension."""
    if settings.dimension is None:
        raise SettingsError(
            "encoder.kind is remote, so encoder.dimension must be set to the length of the server's vectors"
        )
    stands_for = f"remote-1 {model} {settings.dimension}"
    return EncoderFacts(
        name=model,
        fingerprint=hashlib.sha256(stands_for.encode()).hexdigest(),
        dimension=settings.dimension,
        query_template=settings.queries,
    )


class RemoteEncoder:
    """An `Encoder`. Its connections live in a thread of their own, so that `encode` may be called from any, event loop or not."""

    def __init__(
        self,
        model: str,
        batch_size: int,
        settings: EncoderSettings,
        environment: Mapping[str, str] = os.environ,
        now: Callable[[], dt.datetime] = utc_now,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`batch_size`: most texts of one request. Keys are read from `environment`; raises SettingsError if they are not there."""
        facts = remote_facts(model, settings)
        self.name, self.fingerprint = facts.name, facts.fingerprint
        self.dimension, self.query_template = facts.dimension, facts.query_template
        self._batch_size = batch_size
        self._where = f"{settings.server.base_url} ({model})"
        keys = read_keys(settings.server.key_env, environment, "encoder.server.key_env")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="remote-encoder", daemon=True).start()

        async def connect() -> tuple[Attempts, Transport]:
            gate = Gatekeeper(settings.server, clock)
            await gate.open(keys)
            return Attempts(gate, settings.server, clock, sleep), Transport(settings.server, now)

        self._attempts, self._transport = self._run(connect())

    def encode(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dimension], unit rows.

        Raises InfrastructureError when the server does not answer or refuses a text, SettingsError for another dimension.
        """
        batches = [texts[start : start + self._batch_size] for start in range(0, len(texts), self._batch_size)]
        parts = self._run(self._all(batches))
        return np.concatenate(parts) if parts else np.empty((0, self.dimension), np.float32)

    def close(self) -> None:
        """Ends the connections and the thread."""
        self._attempts.close()
        self._run(self._transport.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _all(self, batches: Sequence[Sequence[str]]) -> list[Vectors]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._batch([encodable(t)[:LONGEST_TEXT] for t in b])) for b in batches]
        except ExceptionGroup as errors:
            expected, bugs = errors.split((InfrastructureError, SettingsError))
            if expected is None or bugs is not None:
                raise
            raise expected.exceptions[0] from None  # it ended the other requests
        return [task.result() for task in tasks]

    async def _batch(self, texts: Sequence[str]) -> Vectors:
        body = {"model": self.name, "input": list(texts), "encoding_format": "float"}
        estimate = sum(map(len, texts)) // 4

        async def send(key: str) -> tuple[Vectors, int]:
            answer = await self._transport.post(EMBEDDINGS, key, body)
            tokens = tokens_of(answer)
            return embeddings_of(answer, len(texts), self.dimension), estimate if tokens is None else tokens

        tried = await self._attempts.make(estimate, send, lambda answer: answer[1])
        if tried.answer is not None:
            return tried.answer[0]
        if len(texts) > 1:  # one text is at fault; the others are not to suffer
            half = len(texts) // 2
            return np.concatenate([await self._batch(texts[:half]), await self._batch(texts[half:])])
        said = "" if tried.fault is None else tried.fault.detail
        raise InfrastructureError("encoder-refuses", f"{self._where} refuses the text {texts[0][:200]!r}: {said}")
