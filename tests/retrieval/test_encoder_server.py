"""The body of the encoder actor, in this process: what it remembers, and what becomes of a query that cannot be encoded."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from cluster.config import EncoderSettings
from cluster.failures import InfrastructureError, SettingsError
from retrieval.encoder import HashingEncoder, encode_queries
from retrieval.encoder_server import EncoderServer
from tests.cluster.endpoint_server import Asked, EndpointServer, fail

DIMENSION = 8
INSTRUCTED = EncoderSettings(dimension=DIMENSION, instruction="Find.")
REFERENCE = HashingEncoder(DIMENSION, INSTRUCTED.queries)


def ask(server: EncoderServer, *batches: Sequence[str]) -> list[list[Any]]:
    async def run() -> list[list[Any]]:
        return [await server.encode(batch, 60.0) for batch in batches]

    return asyncio.run(run())


def test_queries_are_encoded_with_the_instruction_and_remembered_up_to_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []
    encode = HashingEncoder.encode

    def noted(self: HashingEncoder, texts: Sequence[str]) -> Any:
        given.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(HashingEncoder, "encode", noted)
    server = EncoderServer("hashing", 4, INSTRUCTED.model_copy(update={"cached_queries": 2}))
    first, second, third = ask(server, ["a", "b", "a"], ["b", "a"], ["c", "d", "b"])
    asked = [text.removeprefix("Instruct: Find.\nQuery:") for text in given]
    assert sorted(asked[:2]) == ["a", "b"]
    assert sorted(asked[2:]) == ["c", "d"]
    for queries, answers in ((["a", "b", "a"], first), (["b", "a"], second), (["c", "d", "b"], third)):
        np.testing.assert_array_equal(np.stack(answers), encode_queries(REFERENCE, queries))


def remote(server: EndpointServer, **changes: Any) -> EncoderServer:
    at = {"base_url": server.url, "server_backoff_s": [0.01], "network_backoff_s": [0.01]}
    settings = EncoderSettings.model_validate({"kind": "remote", "dimension": DIMENSION, "server": at} | changes)
    return EncoderServer("served", 16, settings)


def answer(asked: Asked) -> web.Response:
    vectors = HashingEncoder(DIMENSION).encode(asked.body["input"])
    return web.json_response({"data": [{"index": i, "embedding": v.tolist()} for i, v in enumerate(vectors)]})


def test_a_query_that_the_server_refuses_fails_alone() -> None:
    async def behave(asked: Asked) -> web.StreamResponse:
        return fail(400, "content_policy") if "bad" in asked.body["input"] else answer(asked)

    with EndpointServer(behave) as server:
        (answers,) = ask(remote(server), ["one", "bad", "two"])
    assert [type(a) for a in answers] == [np.ndarray, InfrastructureError, np.ndarray]
    assert (answers[1].reason, answers[1].fatal) == ("encoder-refuses", False)


def test_a_server_that_is_down_fails_all_who_wait_once_and_is_asked_again_by_the_next() -> None:
    down = True

    async def behave(asked: Asked) -> web.StreamResponse:
        return fail(503, "down") if down else answer(asked)

    with EndpointServer(behave) as server:
        encoder = remote(server)
        queries = [f"q{i}" for i in range(10)]
        (answers,) = ask(encoder, queries)
        assert {a.reason for a in answers} == {"endpoint-error"}
        assert len(server.asked) <= 4  # one request for who came first, one for the others, and a retry of each
        down = False
        (answers,) = ask(encoder, queries)
    np.testing.assert_allclose(np.stack(answers), HashingEncoder(DIMENSION).encode(queries), atol=1e-6)


def test_a_wrong_dimension_is_no_failure_that_repeating_mends() -> None:
    async def behave(asked: Asked) -> web.StreamResponse:
        return answer(asked)

    with EndpointServer(behave) as server:
        (answers,) = ask(remote(server, dimension=DIMENSION + 1), ["one"])
    assert isinstance(answers[0], SettingsError)
