"""The endpoint client against a real HTTP server that answers well, badly, late or not at all."""

import asyncio
import datetime as dt
import email.utils
import json
import logging

import pytest
from aiohttp import web

from cluster.clock import utc_now
from cluster.config import EndpointSettings, SamplingSettings
from cluster.endpoint.body import ChatCall, FunctionTool
from cluster.endpoint.client import EndpointClient, Reply
from cluster.endpoint.gatekeeper import NO_KEY, Gatekeeper, read_keys
from cluster.failures import FATAL_REASONS, InfrastructureError
from tests.cluster.endpoint_server import Asked, EndpointServer, chunk, chunks, fail, say, scripted, stream, whole

DAY = dt.date(2031, 5, 4)
TOOL = FunctionTool(name="search", description="", parameters={"type": "object"})
CALL = ChatCall(
    messages=({"role": "user", "content": "Will it?"},), tools=(TOOL,), offered=True, max_tokens=50, date=DAY
)
SEARCH = {"name": "search", "arguments": '{"query": "bridge"}'}
FAST = {
    "model": "slug",
    "network_backoff_s": (0.01, 0.01),
    "server_backoff_s": (0.01, 0.01),
    "rate_limit_backoff_s": (0.01, 0.01),
    "first_token_timeout_s": 2.0,
    "chunk_timeout_s": 1.0,
    "price": {"input": 2.0, "cached": 0.5, "output": 8.0},
}


class Slept:
    """Remembers waits instead of taking them."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


def complete(
    server: EndpointServer, calls: int = 1, keys: str = "", sleep: Slept | None = None, **settings: object
) -> list[Reply | BaseException]:
    """The replies to so many calls made at once."""

    async def run() -> list[Reply | BaseException]:
        tree = EndpointSettings.model_validate({**FAST, "base_url": server.url, **settings})
        gate = Gatekeeper(tree)
        await gate.open(read_keys(["KEYS"], {"KEYS": keys}) if keys else (NO_KEY,))
        client = EndpointClient(gate, tree, SamplingSettings(temperature=0.5), utc_now, sleep=sleep or Slept())
        try:
            return await asyncio.gather(*(client.complete(CALL) for _ in range(calls)), return_exceptions=True)
        finally:
            await client.close()
            assert await gate.running() == 0

    return asyncio.run(run())


def one(server: EndpointServer, **settings: object) -> Reply:
    (reply,) = complete(server, **settings)
    if isinstance(reply, BaseException):
        raise reply
    return reply


@pytest.mark.parametrize("streamed", [True, False])
def test_text_reasoning_calls_usage_and_price_arrive(streamed):
    thought = {"reasoning_content": "Hm."}
    with EndpointServer(scripted(lambda a: say(a, "Let me look.", [SEARCH, SEARCH], **thought))) as server:
        reply = one(server, stream=streamed)
    answer = reply.answer
    assert (answer.text, answer.reasoning, answer.finish) == ("Let me look.", "Hm.", "stop")
    assert [(c.id, c.name, c.arguments) for c in answer.calls] == [
        ("id0", "search", SEARCH["arguments"]),
        ("id1", "search", SEARCH["arguments"]),
    ]
    assert (reply.count.input, reply.count.cached, reply.count.output) == (100, 40, 10)
    assert reply.price == pytest.approx((60 * 2.0 + 40 * 0.5 + 10 * 8.0) / 1e6)
    assert answer.model == "served-1"
    assert answer.system_fingerprint == ("fp_7" if streamed else "")


def test_the_request_is_what_the_protocol_and_the_settings_say():
    with EndpointServer(scripted(say)) as server:
        one(server, extra_body={"reasoning_effort": "low"}, date_variable="date_string", keys="sk-1")
    body = server.asked[0].body
    assert server.asked[0].key == "sk-1"
    assert body == {
        "model": "slug",
        "messages": [{"role": "user", "content": "Will it?"}],
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 1.0,
        "tools": [TOOL.wire()],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"date_string": "04 May 2031"},
    }


def test_nothing_in_a_request_tells_todays_date(monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-the-launcher")
    with EndpointServer(scripted(say)) as server:
        one(server)
    sent = (str(server.asked[0].headers) + server.asked[0].raw.decode()).casefold()
    today = dt.datetime.now(dt.UTC)
    assert "date" not in {name.casefold() for name in server.asked[0].headers}
    for shape in ("%Y-%m", "%Y/%m", "%Y%m", "%d %b %Y", "%b %d", "%B", "%Y"):
        assert today.strftime(shape).casefold() not in sent
    assert "org-of-the-launcher" not in sent


def test_a_thought_inside_the_text_is_kept_apart():
    with EndpointServer(scripted(lambda a: say(a, "<think>I <answer>guess</answer></think>\n\nFinal."))) as server:
        answer = one(server).answer
    assert (answer.text, answer.reasoning) == ("Final.", "I <answer>guess</answer>")


def test_texts_and_thoughts_in_parts_are_joined():
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": "Yes."}]
    with EndpointServer(scripted(lambda a: stream(a, [chunk({"content": parts}, "stop")]))) as server:
        answer = one(server).answer
    assert (answer.text, answer.reasoning) == ("Yes.", "Hm.")


@pytest.mark.parametrize("streamed", [True, False])
def test_arguments_that_are_no_json_are_passed_on_as_written(streamed):
    broken = {"name": "search", "arguments": '{"query": '}
    with EndpointServer(scripted(lambda a: say(a, "", [broken]))) as server:
        (call,) = one(server, stream=streamed).answer.calls
    assert call.arguments == broken["arguments"]


def test_finish_reasons_are_mapped():
    for said, expected in [
        ("length", "length"),
        ("content_filter", "refused"),
        ("tool_calls", "stop"),
        ("eos", "stop"),
    ]:
        with EndpointServer(scripted(lambda a, said=said: say(a, "x", finish=said))) as server:
            assert one(server).answer.finish == expected
    with EndpointServer(scripted(lambda a: say(a, "", refusal="I cannot help with that."))) as server:
        answer = one(server).answer
        assert (answer.finish, answer.text) == ("refused", "I cannot help with that.")


def test_retry_after_is_honoured_in_seconds():
    limited = lambda a: fail(429, "slow down", {"Retry-After": "1.2"})  # noqa: E731
    with EndpointServer(scripted(limited, say)) as server:
        loop_times = []
        server.behave = timed(server.behave, loop_times)
        one(server, rate_limit_backoff_s=(0.01,))
    assert loop_times[1] - loop_times[0] >= 1.2


def test_retry_after_is_honoured_as_a_date():
    def limited(asked: Asked):
        now = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
        dates = {"Date": email.utils.format_datetime(now, True)}
        return fail(429, "", dates | {"Retry-After": email.utils.format_datetime(now + dt.timedelta(seconds=2), True)})

    with EndpointServer(scripted(limited, say)) as server:
        loop_times = []
        server.behave = timed(server.behave, loop_times)
        one(server, rate_limit_backoff_s=(0.01,))
    assert loop_times[1] - loop_times[0] >= 2.0


def timed(behave, times):
    async def noted(asked: Asked):
        times.append(asyncio.get_running_loop().time())
        return await behave(asked)

    return noted


def test_a_server_that_asks_for_hours_stops_the_run():
    behaviour = scripted(lambda a: fail(429, "daily limit", {"Retry-After": "7200"}))
    with EndpointServer(behaviour) as server, pytest.raises(InfrastructureError, match="resume") as error:
        one(server)
    assert error.value.reason == "endpoint-quota"
    assert error.value.fatal
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (lambda a: fail(500, "oops"), "endpoint-error"),
        (lambda a: fail(503, "overloaded"), "endpoint-error"),
        (lambda a: stream(a, [{"error": {"message": "overloaded", "code": 502}}]), "endpoint-error"),
        (lambda a: stream(a, [chunk({"content": "x"}, "error")]), "endpoint-error"),
        (lambda a: stream(a, ["{not json"]), "endpoint-malformed"),
        (lambda a: stream(a, ["3"]), "endpoint-malformed"),
        (lambda a: stream(a, [chunk({"content": "half"})]), "endpoint-malformed"),
        (lambda a: stream(a, []), "endpoint-malformed"),
        (lambda a: stream(a, [{"choices": []}]), "endpoint-malformed"),
        (lambda a: stream(a, [{"choices": {"a": 1}}]), "endpoint-malformed"),
        (lambda a: cut(a), "endpoint-unreachable"),
        (lambda a: cut(a, chunks("a long text")[:2]), "endpoint-unreachable"),
        (lambda a: stream(a, chunks("slow"), gap_s=1.5), "endpoint-unreachable"),
        (lambda a: stream(a, [chunk({}), *chunks("late")], gap_s=3.0), "endpoint-unreachable"),
        (lambda a: fail(429, "slow down"), "endpoint-limited"),
    ],
)
def test_what_may_pass_is_tried_again_and_then_is_infrastructure(behaviour, reason):
    with EndpointServer(scripted(behaviour)) as server:
        with pytest.raises(InfrastructureError) as error:
            one(server, rate_limit_backoff_s=(0.01,))
        assert (error.value.reason, error.value.fatal) == (reason, False)
        assert len(server.asked) == (2 if reason == "endpoint-limited" else 3)
    with EndpointServer(scripted(behaviour, lambda a: say(a, "well"))) as server:
        assert one(server).answer.text == "well"
        assert len(server.asked) == 2


async def cut(asked: Asked, parts=()):
    """Close the connection without another word, after these parts."""
    if parts:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(asked.request)
        for part in parts:
            await response.write(f"data: {json.dumps(part)}\n\n".encode())
        await asyncio.sleep(0.05)
    asked.request.transport.abort()
    await asyncio.sleep(10)


@pytest.mark.parametrize("body", ["<html>gateway</html>", "{cut", "[]", '{"choices": []}', '{"choices": [3]}', "{}"])
def test_a_whole_answer_that_is_not_the_protocols_is_tried_again(body):
    for content_type in ("application/json", "text/html"):
        bad = lambda a, t=content_type: web.Response(text=body, content_type=t)  # noqa: E731
        with EndpointServer(scripted(bad, lambda a: say(a, "well"))) as server:
            assert one(server, stream=False).answer.text == "well"
            assert len(server.asked) == 2


def test_the_waits_are_the_sequence_of_the_faults_class():
    steps = [lambda a: fail(500), lambda a: stream(a, ["{"]), lambda a: fail(500), lambda a: cut(a), say]
    slept = Slept()
    with EndpointServer(scripted(*steps)) as server:
        one(server, sleep=slept, network_backoff_s=(2, 5), server_backoff_s=(7, 11))
    assert slept.waits == [7, 2, 11, 5]


def test_an_unknown_model_or_address_stops_the_run_with_the_servers_words():
    for status, message in [(404, "The model `slug` does not exist"), (400, "model_not_found: slug")]:
        with EndpointServer(scripted(lambda a, s=status, m=message: fail(s, m))) as server:
            with pytest.raises(InfrastructureError, match="slug") as error:
                one(server)
            assert (error.value.reason, error.value.fatal) == ("endpoint-model", True)
            assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_infrastructure():
    with EndpointServer(scripted(say)) as server:
        pass
    with pytest.raises(InfrastructureError, match="endpoint-unreachable: http://127"):
        one(server)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (
            lambda a: fail(400, "This model's maximum context length is 8192 tokens", code="context_length_exceeded"),
            "context-full",
        ),
        (lambda a: fail(413, "too large"), "context-full"),
        (lambda a: fail(400, "flagged", code="content_policy_violation"), "refused"),
        (lambda a: fail(403, "input requires moderation", metadata={"reasons": ["violence"]}), "refused"),
        (lambda a: fail(400, "unsupported parameter: top_k"), "bad-request"),
        (lambda a: fail(422, "messages must alternate"), "bad-request"),
    ],
)
def test_what_belongs_to_the_conversation_is_a_reply_and_not_tried_again(answer, kind):
    with EndpointServer(scripted(answer)) as server:
        reply = one(server)
        assert len(server.asked) == 1
    assert (reply.answer, reply.fault.kind, reply.price) == (None, kind, 0.0)


def test_refused_keys_are_dropped_at_once_and_the_others_serve_on():
    async def behave(asked: Asked):
        return fail(401, f"bad key {asked.key}") if asked.key in ("sk-1", "sk-3") else await say(asked, "well")

    slept = Slept()
    with EndpointServer(behave) as server:
        replies = complete(server, calls=8, keys="sk-1,sk-2,sk-3", sleep=slept, parallel=1)
    assert [r.answer.text for r in replies] == ["well"] * 8
    assert [a.key for a in server.asked].count("sk-1") == 1
    assert [a.key for a in server.asked].count("sk-3") == 1
    assert slept.waits == []


def test_when_every_key_is_refused_the_run_stops_and_no_key_is_shown(caplog):
    caplog.set_level(logging.DEBUG)
    with EndpointServer(scripted(lambda a: fail(401, f"Incorrect API key provided: {a.key}"))) as server:
        errors = complete(server, calls=3, keys="sk-secret1,sk-secret2", key_env=("MY_KEYS",))
    assert {e.reason for e in errors} == {"endpoint-auth"} <= FATAL_REASONS
    assert "MY_KEYS" in str(errors[0])
    shown = caplog.text + "".join(str(e) + repr(e) for e in errors)
    assert "secret" not in shown


def test_a_limited_key_rests_while_another_serves():
    async def behave(asked: Asked):
        return fail(429, "slow down") if asked.key == "sk-1" else await say(asked, "well")

    slept = Slept()
    with EndpointServer(behave) as server:
        replies = complete(server, calls=20, keys="sk-1,sk-2", sleep=slept, parallel=2, rate_limit_backoff_s=())
    assert [r.answer.text for r in replies] == ["well"] * 20
    assert [a.key for a in server.asked].count("sk-1") == 1
    assert slept.waits == []


def test_keys_take_turns():
    with EndpointServer(scripted(say)) as server:
        complete(server, calls=30, keys="sk-1, sk-2,sk-3", parallel=4)
    counts = [[a.key for a in server.asked].count(f"sk-{i}") for i in (1, 2, 3)]
    assert counts == [10, 10, 10]


def test_no_more_requests_are_in_flight_than_allowed():
    async def behave(asked: Asked):
        await asyncio.sleep(0.03)
        return await say(asked, "well")

    with EndpointServer(behave) as server:
        replies = complete(server, calls=40, parallel=5)
        assert server.most == 5
    assert len(replies) == 40


def test_a_call_that_is_given_up_frees_its_slot_and_ends_at_the_server():
    async def behave(asked: Asked):
        if asked.number == 0:
            await asyncio.sleep(30)
        return await say(asked, "well")

    async def run(server: EndpointServer) -> None:
        tree = EndpointSettings.model_validate(
            {**FAST, "base_url": server.url, "parallel": 1, "first_token_timeout_s": 60}
        )
        gate = Gatekeeper(tree)
        await gate.open((NO_KEY,))
        client = EndpointClient(gate, tree, SamplingSettings(), utc_now)
        stuck = asyncio.create_task(client.complete(CALL))
        while server.running == 0:
            await asyncio.sleep(0.01)
        queued = [asyncio.create_task(client.complete(CALL)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in (queued[0], stuck):
            task.cancel()
        done = await asyncio.gather(stuck, *queued, return_exceptions=True)
        assert [isinstance(d, asyncio.CancelledError) for d in done] == [True, True, False, False]
        while await gate.running() or server.running:
            await asyncio.sleep(0.01)
        await client.close()

    with EndpointServer(behave) as server:
        asyncio.run(asyncio.wait_for(run(server), 20))
        assert server.dropped == 1


def test_browsing_is_seen_in_what_comes_back():
    note = [{"type": "url_citation", "url_citation": {"url": "https://news.example"}}]
    signs = [
        lambda a: say(a, "x", annotations=note),
        lambda a: stream(a, [*chunks("x"), {"choices": [], "usage": {"server_tool_use": {"web_search_requests": 2}}}]),
        lambda a: stream(a, [chunk({"content": "x"}, "stop", citations=["https://news.example"])]),
        lambda a: stream(a, [chunk({"tool_calls": [{"index": 0, "type": "web_search_call"}]}, "stop")]),
    ]
    for sign in signs:
        with EndpointServer(scripted(sign)) as server:
            assert one(server).answer.browsed
    with EndpointServer(scripted(lambda a: say(a, "x", annotations=[]))) as server:
        assert one(server, stream=False).answer.browsed == ""


def test_a_server_that_does_not_count_is_estimated_and_said_once(caplog):
    with EndpointServer(scripted(lambda a: stream(a, chunks("word " * 80)))) as server:
        replies = complete(server, calls=3)
    assert all(r.count.output == 100 and r.count.input > 0 and r.price > 0 for r in replies)
    assert caplog.text.count("estimated") == 1


def test_a_redirect_is_not_followed():
    def away(asked: Asked):
        return web.Response(status=307, headers={"Location": "/v1/elsewhere"})

    with EndpointServer(scripted(away)) as server:
        assert one(server).fault.kind == "bad-request"


def test_half_a_character_can_be_stored():
    with EndpointServer(scripted(lambda a: say(a, "a\ud800b"))) as server:
        assert one(server).answer.text.encode()


def test_whole_answers_and_streams_mean_the_same():
    with EndpointServer(scripted(lambda a: say(a, "text", [SEARCH], reasoning="why"))) as server:
        streamed, at_once = one(server).answer, one(server, stream=False).answer
    assert streamed.model_copy(update={"system_fingerprint": ""}) == at_once
    assert whole("x")["choices"]
