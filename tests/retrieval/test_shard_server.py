"""The body of a shard actor, in this process."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from corpora import START, corpus

from cluster.failures import InfrastructureError
from retrieval.build import build_index
from retrieval.encoder import HashingEncoder
from retrieval.half import from_half, to_half
from retrieval.kernel_float import FloatRows
from retrieval.library import Library
from retrieval.mask import Vectors
from retrieval.scan import Query
from retrieval.shard_server import Serving, ShardServer


def test_a_machine_that_multiplies_too_carelessly_fails_the_whole_batch_though_each_query_would_pass_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(rows: FloatRows, queries: Vectors, out: Vectors, *, with_torch: bool) -> Vectors:
        factor = from_half(to_half(queries)) if len(queries) > 1 else queries
        return np.matmul(rows.array, factor.T, out=out)

    monkeypatch.setattr("retrieval.kernel_float.product", careless)
    build_index(corpus(200), HashingEncoder(), tmp_path)
    library = Library.open(tmp_path)
    vectors = np.random.default_rng(1).standard_normal((8, library.manifest.encoder.dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = [Query(vector, None, START.date().replace(year=2100), 10) for vector in vectors]

    async def ask() -> tuple[list[object], list[object]]:
        server = ShardServer(Serving(index="i", directory=tmp_path, shards=library.manifest.shards))
        return await server.search(queries, 60.0), await server.search(queries[:1], 60.0)

    together, alone = asyncio.run(ask())
    assert all(isinstance(a, InfrastructureError) and a.reason == "retrieval-inexact" for a in together)
    assert [isinstance(a, Exception) for a in alone] == [False]
