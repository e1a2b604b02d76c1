"""The remote encoder against a real HTTP server that answers well, badly, late or not at all."""

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from cluster.config import EncoderSettings
from cluster.failures import InfrastructureError, SettingsError
from retrieval.encoder import HashingEncoder, encode_queries, encoder_facts, facts_of
from retrieval.mask import Vectors
from retrieval.remote_encoder import LONGEST_TEXT, RemoteEncoder
from tests.cluster.endpoint_server import Asked, EndpointServer, fail, scripted

DIMENSION = 16
TEXTS = ["copper tariff", "a glacier", "ballot and senate", "harbour", "orchard lantern"]
REFERENCE = HashingEncoder(DIMENSION)


def answer(asked: Asked, scale: float = 3.0, **changes: Any) -> web.Response:
    """The vectors of the texts asked for, not normalized."""
    texts = asked.body["input"]
    rows = [
        {"object": "embedding", "index": i, "embedding": [scale * float(v) for v in vector]}
        for i, vector in enumerate(REFERENCE.encode(texts))
    ]
    whole = {"object": "list", "data": rows, "model": "served", "usage": {"total_tokens": 9 * len(texts)}}
    return web.json_response(whole | changes, dumps=json.dumps)


def edited(edit: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Asked], web.Response]:
    """The good answer with its rows changed."""

    def behave(asked: Asked) -> web.Response:
        whole = json.loads(answer(asked).body)
        changed = edit(whole["data"])
        whole["data"] = whole["data"] if changed is None else changed
        return web.json_response(whole, dumps=json.dumps)

    return behave


def cut(asked: Asked) -> web.Response:
    """The connection ends where an answer would begin."""
    assert asked.request.transport is not None
    asked.request.transport.abort()
    return web.Response()


@pytest.fixture
def opened() -> Iterator[Callable[..., RemoteEncoder]]:
    """Makes encoders that wait for nothing, and closes them."""
    made: list[RemoteEncoder] = []

    async def no_sleep(seconds: float) -> None:
        waits.append(seconds)

    waits: list[float] = []

    def open_(at: EndpointServer, batch: int = 64, keys: str = "", **changes: Any) -> RemoteEncoder:
        tree = {
            "base_url": at.url,
            "key_env": ["KEYS"] if keys else [],
            "network_backoff_s": (0.01, 0.01),
            "server_backoff_s": (0.01, 0.01),
            "rate_limit_backoff_s": (0.01, 0.01),
        } | changes.pop("server", {})
        settings = EncoderSettings.model_validate({"kind": "remote", "dimension": DIMENSION, "server": tree, **changes})
        made.append(RemoteEncoder("served", batch, settings, {"KEYS": keys}, sleep=no_sleep))
        return made[-1]

    yield open_
    for encoder in made:
        encoder.close()


Open = Callable[..., RemoteEncoder]


def expected(texts: list[str]) -> Vectors:
    return REFERENCE.encode(texts)


def test_vectors_come_normalized_in_the_order_of_the_texts_over_many_requests(opened: Open) -> None:
    with EndpointServer(scripted(answer)) as server:
        vectors = opened(server, batch=2).encode(TEXTS)
    assert len(server.asked) == 3
    assert {len(asked.body["input"]) for asked in server.asked} == {1, 2}
    assert server.asked[0].body["model"] == "served"
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected(TEXTS), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def as_base64(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["embedding"] = base64.b64encode(np.asarray(row["embedding"], "<f4").tobytes()).decode()


def without_numbers(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        del row["index"]


@pytest.mark.parametrize(
    "edit", [lambda rows: rows[::-1], lambda rows: rows[1:] + rows[:1], as_base64, without_numbers]
)
def test_rows_belong_to_the_text_that_they_name(opened: Open, edit: Callable[..., Any]) -> None:
    with EndpointServer(scripted(edited(edit))) as server:
        np.testing.assert_allclose(opened(server).encode(TEXTS), expected(TEXTS), atol=1e-6)


def not_finite(rows: list[dict[str, Any]]) -> None:
    rows[1]["embedding"][3] = float("nan")


def infinite(rows: list[dict[str, Any]]) -> None:
    rows[1]["embedding"][3] = float("inf")


def zero(rows: list[dict[str, Any]]) -> None:
    rows[1]["embedding"] = [0.0] * DIMENSION


def absent(rows: list[dict[str, Any]]) -> None:
    rows[1]["embedding"][3] = None


def nested(rows: list[dict[str, Any]]) -> None:
    rows[1]["embedding"] = [[1.0] * DIMENSION]


def words(rows: list[dict[str, Any]]) -> None:
    rows[1]["embedding"] = ["1"] * DIMENSION


def one_twice(rows: list[dict[str, Any]]) -> None:
    rows[1]["index"] = 0


def half_numbered(rows: list[dict[str, Any]]) -> None:
    del rows[1]["index"]


BROKEN = [
    not_finite,
    infinite,
    zero,
    absent,
    nested,
    words,
    one_twice,
    half_numbered,
    lambda rows: rows[1:],
    lambda rows: [*rows, rows[0]],
    lambda rows: [],
    lambda rows: {"0": rows[0]},
]


@pytest.mark.parametrize("edit", BROKEN)
def test_an_answer_that_is_not_one_finite_vector_for_each_text_is_asked_for_again_and_never_used(
    opened: Open, edit: Callable[..., Any]
) -> None:
    with EndpointServer(scripted(edited(edit), answer)) as server:
        np.testing.assert_allclose(opened(server).encode(TEXTS), expected(TEXTS), atol=1e-6)
    assert len(server.asked) == 2
    with (
        EndpointServer(scripted(edited(edit))) as server,
        pytest.raises(InfrastructureError, match="endpoint-malformed"),
    ):
        opened(server).encode(TEXTS)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda asked: fail(500, "oh"), "endpoint-error"),
        (lambda asked: fail(503, "busy"), "endpoint-error"),
        (cut, "endpoint-unreachable"),
        (lambda asked: web.Response(text="<html>"), "endpoint-malformed"),
        (lambda asked: web.json_response({"error": {"message": "overloaded", "code": 503}}), "endpoint-error"),
    ],
)
def test_a_server_that_fails_is_asked_again_and_then_given_up(
    opened: Open, fault: Callable[[Asked], Any], reason: str
) -> None:
    with EndpointServer(scripted(fault, fault, answer)) as server:
        np.testing.assert_allclose(opened(server).encode(TEXTS), expected(TEXTS), atol=1e-6)
    with EndpointServer(scripted(fault)) as server, pytest.raises(InfrastructureError, match=reason):
        opened(server).encode(TEXTS)
    assert len(server.asked) == 3


def test_a_limited_key_rests_and_another_one_takes_over(opened: Open) -> None:
    async def behave(asked: Asked) -> web.StreamResponse:
        return fail(429, "slow down", {"retry-after": "30"}) if asked.key == "first" else answer(asked)

    with EndpointServer(behave) as server:
        np.testing.assert_allclose(opened(server, keys="first,second").encode(TEXTS), expected(TEXTS), atol=1e-6)
    assert [asked.key for asked in server.asked] == ["first", "second"]


def test_a_refused_key_is_said_once_and_never_shown(opened: Open) -> None:
    refuse = scripted(lambda asked: fail(401, f"wrong key {asked.key}"))
    with EndpointServer(refuse) as server, pytest.raises(InfrastructureError, match="endpoint-auth") as raised:
        opened(server, keys="sk-secret").encode(TEXTS)
    assert raised.value.fatal
    assert "sk-secret" not in str(raised.value)


def test_a_key_that_is_not_in_the_environment_is_named(opened: Open) -> None:
    with (
        EndpointServer(scripted(answer)) as server,
        pytest.raises(SettingsError, match=r"KEYS.*encoder\.server\.key_env"),
    ):
        opened(server, server={"key_env": ["KEYS"]})


def test_vectors_of_another_dimension_are_refused_at_once(opened: Open) -> None:
    with (
        EndpointServer(scripted(answer)) as server,
        pytest.raises(SettingsError, match=r"16 dimensions.*encoder\.dimension is 24"),
    ):
        opened(server, dimension=24).encode(TEXTS)
    assert len(server.asked) == 1


def test_a_text_that_the_server_refuses_is_named_and_costs_only_itself(opened: Open) -> None:
    async def behave(asked: Asked) -> web.StreamResponse:
        return fail(400, "content_policy") if any("senate" in text for text in asked.body["input"]) else answer(asked)

    with EndpointServer(behave) as server:
        encoder = opened(server)
        with pytest.raises(InfrastructureError, match=r"encoder-refuses.*ballot and senate") as raised:
            encoder.encode(TEXTS)
        assert not raised.value.fatal
        rest = [text for text in TEXTS if "senate" not in text]
        np.testing.assert_allclose(encoder.encode(rest), expected(rest), atol=1e-6)


def test_no_more_requests_are_in_flight_than_allowed(opened: Open) -> None:
    with EndpointServer(scripted(answer)) as server:
        opened(server, batch=1, server={"parallel": 2}).encode(TEXTS * 4)
    assert len(server.asked) == 20
    assert server.most <= 2


def test_an_instruction_is_put_before_queries_and_never_before_articles(opened: Open) -> None:
    with EndpointServer(scripted(answer)) as server:
        encoder = opened(server, instruction="Find news.")
        encoder.encode(["an article"])
        encode_queries(encoder, ["a {query}"])
    assert [asked.body["input"] for asked in server.asked] == [
        ["an article"],
        ["Instruct: Find news.\nQuery:a {query}"],
    ]


def test_a_text_without_end_and_half_a_character_are_sent_so_that_a_server_can_take_them(opened: Open) -> None:
    with EndpointServer(scripted(answer)) as server:
        vectors = opened(server).encode(["w" * (2 * LONGEST_TEXT), "\ud800"])
    assert vectors.shape == (2, DIMENSION)
    assert [len(text) for text in server.asked[0].body["input"]] == [LONGEST_TEXT, 1]


def test_no_texts_ask_nobody(opened: Open) -> None:
    with EndpointServer(scripted(answer)) as server:
        assert opened(server).encode([]).shape == (0, DIMENSION)
    assert server.asked == []


def test_the_address_is_no_part_of_the_identity_but_model_dimension_and_instruction_are() -> None:
    def facts(model: str = "m", **changes: Any) -> tuple[str, int, str]:
        tree = {"kind": "remote", "dimension": 8, "server": {"base_url": "http://a.example/v1"}} | changes
        found = facts_of(model, EncoderSettings.model_validate(tree))
        return found.fingerprint, found.dimension, found.query_template

    assert facts() == facts(server={"base_url": "https://elsewhere.example/v1", "parallel": 3})
    others = [facts("n"), facts(dimension=9), facts(instruction="Find."), facts(instruction="Find!")]
    assert len({facts(), *others}) == 5
    assert facts()[0] == facts(instruction="Find.")[0]


def test_facts_are_known_before_anything_is_asked(opened: Open) -> None:
    with EndpointServer(scripted(answer)) as server:
        encoder = opened(server, instruction="Find.")
        settings = EncoderSettings.model_validate(
            {"kind": "remote", "dimension": DIMENSION, "instruction": "Find.", "server": {"base_url": server.url}}
        )
        assert encoder_facts(encoder) == facts_of("served", settings)
    assert server.asked == []
