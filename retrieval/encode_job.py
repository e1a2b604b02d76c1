"""The encoding of a build as a Ray Data job: chunks in, an encoder in each actor, vectors out.

A dead actor or node costs the chunks that it had; Ray Data gives them to another. An error of ours ends the job as it would end a
build without Ray.
"""

import logging
import os
import pickle
from collections.abc import Generator, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from cluster.config import EncoderSettings, Settings
from cluster.failures import InfrastructureError, PastcastError, SettingsError
from cluster.resources import Amounts, shortage
from cluster.session import start_session
from retrieval.chunks import Chunk, Encode, Encoded
from retrieval.encoder import Encoder, encoder_facts, located, open_encoder
from retrieval.manifest import EncoderFacts

_log = logging.getLogger(__name__)

_CHUNKS = pa.schema([("month", pa.string()), ("rows", pa.list_(pa.int64())), ("texts", pa.list_(pa.large_string()))])
_VECTORS = pa.schema(
    [
        ("month", pa.string()),
        ("rows", pa.list_(pa.int64())),
        ("vectors", pa.large_binary()),
        ("error", pa.large_binary()),
    ]
)


class ChunkEncoder:
    """The body of an actor."""

    def __init__(self, name: str, batch_size: int, settings: EncoderSettings, facts: EncoderFacts) -> None:
        """`facts`: what the index will say of its encoder. Loads nothing yet: what is wrong with an encoder is told by a call."""
        self._name, self._batch_size, self._settings, self._facts = name, batch_size, settings, facts

    def __call__(self, chunks: pa.Table) -> pa.Table:
        """A row of vectors for each chunk; an error of ours is a row too, since Ray Data would bury it in its own."""
        found = []
        for chunk in chunks.to_pylist():
            vectors, error = b"", b""
            try:
                vectors = np.ascontiguousarray(self._encoder.encode(chunk["texts"]), np.float32).tobytes()
            except PastcastError as failed:
                error = pickle.dumps(failed)
            found.append({"month": chunk["month"], "rows": chunk["rows"], "vectors": vectors, "error": error})
        return pa.Table.from_pylist(found, schema=_VECTORS)

    @cached_property
    def _encoder(self) -> Encoder:
        encoder = open_encoder(self._name, self._batch_size, self._settings)
        if encoder_facts(encoder) != self._facts:
            raise SettingsError(
                f"encoder {self._name} on node {os.uname().nodename} is not the one of the building process "
                f"({encoder.fingerprint[:12]}, not {self._facts.fingerprint[:12]}); prepare the same one on every node"
            )
        return encoder


def encode_on_ray(settings: Settings, facts: EncoderFacts) -> Encode:
    """Encodes in `encoder.build_actors` actors of the session that `ray` names; one that is started for it ends with it."""

    def encode(chunks: Iterable[Chunk]) -> Generator[Encoded, None, None]:
        tables = [_table(chunk) for chunk in chunks]
        if not tables:
            return
        with start_session(settings.ray) as session:
            _require_room(settings.encoder, session.nodes())
            yield from _run(tables, settings, facts)

    return encode


def _run(tables: list[pa.Table], settings: Settings, facts: EncoderFacts) -> Generator[Encoded, None, None]:
    import ray.data  # takes a second, which only this job needs

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # the build shows its own
    context.print_on_execution_start = False
    if not _log.isEnabledFor(logging.INFO):
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it tells of every start and end
    encoder, actors = settings.encoder, min(settings.encoder.build_actors, len(tables))
    _log.info("%d chunks are encoded by %d actors", len(tables), actors)
    encoded = ray.data.from_arrow(tables).map_batches(
        ChunkEncoder,
        fn_constructor_args=(located(settings.index.encoder, encoder), settings.index.batch_size, encoder, facts),
        compute=ray.data.ActorPoolStrategy(size=actors),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=encoder.cpus,
        num_gpus=encoder.gpus or None,
    )
    try:
        for batch in encoded.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            for row in batch.to_pylist():
                if row["error"]:
                    raise pickle.loads(row["error"])
                vectors = np.frombuffer(row["vectors"], np.float32).reshape(len(row["rows"]), facts.dimension)
                yield Encoded(row["month"], tuple(row["rows"]), vectors)
    except ray.exceptions.RayError as error:
        if isinstance(error, ray.exceptions.UserCodeException):
            raise  # a bug of ours or of an encoder's library, and loud
        raise InfrastructureError("encoder-lost", f"the Ray Data job ended: {error}; build again to go on") from error


def _table(chunk: Chunk) -> pa.Table:
    row: dict[str, Any] = {"month": chunk.month, "rows": list(chunk.rows), "texts": list(chunk.texts)}
    return pa.Table.from_pylist([row], schema=_CHUNKS)


def _require_room(encoder: EncoderSettings, nodes: list[Amounts]) -> None:
    """Raises SettingsError if not even one actor would ever fit: Ray Data would wait for ever."""
    bundle = {name: amount for name, amount in (("CPU", encoder.cpus), ("GPU", encoder.gpus)) if amount}
    if bundle and (lack := shortage([bundle], nodes)) is not None:
        raise SettingsError(
            f"an encoder does not fit: {lack}. Lower encoder.cpus or encoder.gpus, or use a larger cluster"
        )
