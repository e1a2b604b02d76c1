"""A forecast step over a real HTTP endpoint: calls and results pair up, every ending is a record, and nothing browsed counts."""

import asyncio
import datetime as dt
import json

import pytest

from cluster.clock import monotonic, utc_now
from cluster.config import BudgetSettings, EndpointSettings, RetrievalSettings, SamplingSettings
from cluster.endpoint.client import EndpointClient
from cluster.endpoint.gatekeeper import NO_KEY, Gatekeeper
from rollout.dialogue import MessageDialogue
from rollout.endpoint_model import EndpointModel, endpoint_weights, proving_calls, wire_messages
from rollout.events.event import EventPrompt
from rollout.notebook import Assessment, Notebook, NotebookState
from rollout.packed import pack, unpack_trajectory
from rollout.record import ForecastKey, ForecastRecord
from rollout.step import Sample, StepTask, forecast_step
from rollout.tools import TOOLS
from rollout.trajectory import Message, ToolCall, ToolResult, Trajectory
from tests.cluster.endpoint_server import EndpointServer, chunks, fail, say, scripted, stream

DAY = dt.date(2031, 5, 4)
EVENT = EventPrompt(
    id="e",
    question="Will the bridge open?",
    criteria="",
    background="",
    options=("Yes", "No"),
    selection="single",
    deadline=None,
)
ANSWER = '<answer>{"Yes": 0.6, "No": 0.4}</answer>'
SEARCH = {"name": "search", "arguments": '{"query": "bridge"}'}
CARRIED = NotebookState(notebook=Notebook(assessment=Assessment(p={"Yes": 0.5})), status="valid")


def play(
    server: EndpointServer, mode: str = "memory-free", max_tokens: int = 100, result: str = "found", **settings: object
) -> tuple[ForecastRecord, Trajectory]:
    """One step; every tool returns one line."""

    async def run() -> tuple[ForecastRecord, Trajectory]:
        values = {"base_url": server.url, "model": "slug", "price": {"input": 10, "output": 10}, **settings}
        tree = EndpointSettings.model_validate(values)
        gate = Gatekeeper(tree)
        await gate.open((NO_KEY,))
        client = EndpointClient(gate, tree, SamplingSettings(), utc_now)
        model = EndpointModel(client, endpoint_weights(server.url, "slug"), tree.reasoning_field)
        task = StepTask(
            key=ForecastKey(model="m", event="e", date=DAY, mode=mode, rollout=0),
            event=EVENT,
            carried=CARRIED if mode == "memory-on" else None,
            variant="compact",
            policy="strict",
            budget=BudgetSettings(iterations=3, calls=5),
            retrieval=RetrievalSettings(),
            max_tokens=max_tokens,
        )
        step = forecast_step(task, MessageDialogue(tree.context_tokens), monotonic)
        want = next(step)
        try:
            while True:
                if isinstance(want, Sample):
                    want = step.send(await model.sample(want.request))
                else:
                    texts = [ToolResult(call_id=w.call_id, name="search", text=result) for w in want.wants]
                    want = step.send(tuple(texts))
        except StopIteration as end:
            return end.value
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_step_searches_answers_and_knows_what_it_cost():
    steps = [
        lambda a: say(a, "", [SEARCH | {"id": "same"}, SEARCH | {"id": "same"}], reasoning="Hm."),
        lambda a: say(a, ANSWER),
    ]
    with EndpointServer(scripted(*steps)) as server:
        record, trajectory = play(server)
    assert record.failure is None
    assert record.report.probabilities == {"Yes": 0.6, "No": 0.4}
    usage = record.usage
    assert (usage.model_calls, usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (2, 200, 80, 20)
    assert usage.price == pytest.approx(2 * 110 * 10 / 1e6)
    assert record.weights == f"slug@{server.url} served=served-1 system_fingerprint=fp_7"
    assert trajectory.turns[0].reasoning == "Hm."
    assert (trajectory.tokenizer, trajectory.token_ids()) == ("", [])
    assert unpack_trajectory(pack(record, trajectory).trajectory) == trajectory
    # Results are paired with the calls that the server is shown, whatever ids the model gave.
    _, _, assistant, *results = server.asked[1].body["messages"]
    ids = [c["id"] for c in assistant["tool_calls"]]
    assert ids == ["t000c0000", "t000c0001"]
    assert [r["tool_call_id"] for r in results] == ids
    assert assistant["content"] is None
    assert {t["function"]["name"] for t in server.asked[0].body["tools"]} == set(TOOLS)


@pytest.mark.parametrize(("mode", "withdrawn"), [("choice-none", "none"), ("omitted", None)])
def test_tools_are_withdrawn_as_the_settings_say(mode, withdrawn):
    with EndpointServer(scripted(lambda a: say(a, "I do not know yet."))) as server:
        play(server, tools=mode)
    assert [a.body.get("tool_choice") for a in server.asked] == ["auto", withdrawn]
    assert ("tools" in server.asked[1].body) == (withdrawn is not None)


def test_a_step_without_tools_mentions_none():
    with EndpointServer(scripted(lambda a: say(a, ANSWER))) as server:
        play(server, mode="no-tools")
    assert "tools" not in server.asked[0].body
    assert "tool_choice" not in server.asked[0].body


def test_arguments_and_names_that_no_server_takes_are_sent_back_readable():
    steps = [lambda a: say(a, "", [{"name": "web search", "arguments": "{broken"}]), lambda a: say(a, ANSWER)]
    with EndpointServer(scripted(*steps)) as server:
        record, trajectory = play(server)
    (call,) = server.asked[1].body["messages"][2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"unreadable": "{broken"}
    assert call["function"]["name"] == "web_search"
    # The transcript holds what the model wrote.
    assert [(c.name, c.arguments) for c in trajectory.turns[0].tool_calls] == [("web search", "{broken")]
    assert record.usage.tool_errors == {"unknown-tool": 1}


def full(asked):
    return fail(400, "maximum context length exceeded", code="context_length_exceeded")


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([full], "prompt-too-long"),
        ([lambda a: say(a, "", [SEARCH]), full], "context-full"),
        ([lambda a: fail(400, "blocked", code="content_filter")], "content-refused"),
        ([lambda a: say(a, "", refusal="I cannot.")], "content-refused"),
        ([lambda a: say(a, "half of", finish="content_filter")], "content-refused"),
        ([lambda a: say(a, "", [SEARCH]), lambda a: fail(400, "messages are malformed")], "bad-request"),
        ([lambda a: say(a, "no idea")], "no-answer"),
        ([lambda a: say(a, "I think", finish="length")], "output-cut"),
    ],
)
def test_what_the_server_or_the_model_declines_is_a_record_with_a_reason(steps, reason):
    with EndpointServer(scripted(*steps)) as server:
        record, trajectory = play(server)
    assert (record.failure.kind, record.failure.reason) == ("model", reason)
    assert record.failure.detail
    assert pack(record, trajectory).failure == record.failure


def test_an_answer_cut_by_a_filter_after_the_report_still_counts():
    with EndpointServer(scripted(lambda a: say(a, ANSWER, finish="content_filter"))) as server:
        record, _ = play(server)
    assert record.failure is None


@pytest.mark.parametrize("mode", ["memory-free", "memory-on"])
def test_an_answer_that_shows_browsing_is_a_loud_failure_and_no_forecast(mode, caplog):
    note = [{"type": "url_citation", "url_citation": {"url": "https://news.example/outcome"}}]
    with EndpointServer(scripted(lambda a: say(a, ANSWER, [SEARCH], annotations=note))) as server:
        record, trajectory = play(server, mode=mode)
        assert len(server.asked) == 1
    assert (record.failure.kind, record.failure.reason) == ("model", "provider-browsed")
    assert "news.example/outcome" in record.failure.detail
    assert record.report.verdict == "unusable"
    assert "BOUNDARY" in caplog.text
    # What was said stays in the transcript, for an audit; no tool was run, no notebook written.
    assert trajectory.turns[0].text == ANSWER
    assert trajectory.turns[0].results == ()
    if mode == "memory-on":
        assert (record.notebook.notebook, record.notebook.status) == (CARRIED.notebook, "missing")


def test_a_result_without_a_call_is_said_as_text():
    call = ToolCall(id="x", name="search", arguments="{}")
    messages = [
        Message(role="user", content="q"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="found", call_id="x"),
        Message(role="tool", content="a call could not be read", call_id=""),
        Message(role="assistant", content="so"),
    ]
    wire = list(wire_messages(messages))
    assert [m["role"] for m in wire] == ["user", "assistant", "tool", "user", "assistant"]
    assert wire[2] == {"role": "tool", "tool_call_id": "x", "content": "found"}


def test_a_run_is_proved_with_what_its_steps_will_send():
    keys = [
        ForecastKey(model="m", event="e", date=DAY + dt.timedelta(days=i), mode="no-tools", rollout=0) for i in range(2)
    ]
    (plain,) = proving_calls(keys, 10)
    assert (plain.tools, plain.date, plain.max_tokens) == ((), DAY, 10)
    offered = proving_calls([*keys, keys[0].model_copy(update={"mode": "memory-free"})], 1000)
    assert [(len(c.tools), c.offered) for c in offered] == [(3, True), (3, False)]


def test_a_prompt_that_fits_is_answered_shorter_where_the_longest_answer_would_not_fit():
    async def behave(asked):
        return full(asked) if asked.body["max_tokens"] > 700 else await say(asked, ANSWER)

    with EndpointServer(behave) as server:
        record, _ = play(server, max_tokens=4000)
    assert [a.body["max_tokens"] for a in server.asked] == [4000, 2000, 1000, 500]
    assert record.failure is None
    with EndpointServer(scripted(full)) as server:
        record, _ = play(server, max_tokens=600)
    assert [a.body["max_tokens"] for a in server.asked] == [600, 300, 256]
    assert record.failure.reason == "prompt-too-long"


def test_results_are_cut_and_tools_withdrawn_before_the_servers_context_is_full():
    async def behave(asked):
        counted = {"prompt_tokens": 2200 + 550 * asked.number, "completion_tokens": 50}
        calls = [] if asked.body["tool_choice"] == "none" else [SEARCH]
        parts = [*chunks("" if calls else ANSWER, calls), {"choices": [], "usage": counted}]
        return await stream(asked, parts)

    with EndpointServer(behave) as server:
        record, trajectory = play(server, result="word " * 2000, context_tokens=3000)
    # The first result, of 2,500 tokens, is cut to what the 750 that are left hold beside a report; after the second turn 200
    # are left, so the report is demanded.
    assert [a.body["tool_choice"] for a in server.asked] == ["auto", "auto", "none"]
    (result,) = trajectory.turns[0].results
    assert 0 < len(result.text) < 4 * 600
    assert result.cut_characters > 0
    assert record.failure is None


@pytest.mark.parametrize("field", ["", "reasoning_content"])
def test_earlier_reasoning_is_sent_back_only_where_it_is_asked_for(field):
    steps = [lambda a: say(a, "", [SEARCH], reasoning="Hm."), lambda a: say(a, ANSWER)]
    with EndpointServer(scripted(*steps)) as server:
        play(server, reasoning_field=field)
    assistant = server.asked[1].body["messages"][2]
    assert assistant.get("reasoning_content") == ("Hm." if field else None)
    assert "Hm." not in str(assistant | {"reasoning_content": ""})
