"""What the audit of a finished transcript finds, and which steps it looks at."""

import asyncio
import datetime as dt
import math

import pytest

from cluster.config import BudgetSettings, RetrievalSettings
from cluster.home import model_path
from rollout.audit import BrokenTranscript, Exchange, WitnessedModel, check_transcript, faults, is_checked
from rollout.chat import HermesFormat
from rollout.dialogue import TokenDialogue
from rollout.driver import drive
from rollout.events.event import EventPrompt
from rollout.model import Completion
from rollout.record import ForecastKey
from rollout.step import StepTask, forecast_step
from rollout.trajectory import MalformedCall, Message
from rollout.turn_parser import TurnParser

DAY = dt.date(2031, 5, 4)
EVENT = EventPrompt(
    id="e", question="Will it?", criteria="", background="", options=("Yes", "No"), selection="single", deadline=None
)
CALL = '<tool_call>{"name": "browse", "arguments": {}}</tool_call>'
KEY = ForecastKey(model="m", event="e", date=DAY, mode="memory-free", rollout=0)


class Scripted:
    """A token model that samples what it is given."""

    def __init__(self, chat, tokenizer, *texts):
        self._ids = [(*tokenizer.encode(t, add_special_tokens=False), chat.stop_ids[0]) for t in texts]

    async def sample(self, request):
        ids = self._ids.pop(0)
        return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids))

    async def release(self, session):
        pass


@pytest.fixture(scope="module")
def played():
    """(chat, trajectory, exchanges) of a step of two turns."""
    path = model_path("smollm2-135m")
    if not path.is_dir():
        pytest.skip("SmolLM2 is not prepared; run `make setup`")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = HermesFormat(tokenizer, TurnParser(tokenizer, "hermes", ""))
    model = WitnessedModel(Scripted(chat, tokenizer, CALL, '<answer>{"Yes": 0.6, "No": 0.4}</answer>'))
    task = StepTask(
        key=KEY,
        event=EVENT,
        variant="compact",
        policy="strict",
        budget=BudgetSettings(),
        retrieval=RetrievalSettings(),
        max_tokens=100,
    )
    _, trajectory = asyncio.run(
        drive(forecast_step(task, TokenDialogue(chat, 2000), lambda: 0.0), model, None, "s", True)
    )
    return chat, trajectory, tuple(model.exchanges)


def test_a_sound_transcript_has_no_fault(played):
    chat, trajectory, exchanges = played
    assert len(exchanges) == 2
    assert faults(trajectory, exchanges, chat, DAY) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_ids": (5, 6)}, "prompt ids"),
        ({"sampled_ids": (5,), "logprobs": (-1.0,)}, "sampled ids"),
        ({"logprobs": "shifted"}, "log-probabilities"),
        ({"text": "other words"}, "what the turn says"),
        ({"malformed_calls": (MalformedCall(kind="bad-json", reason="x"),)}, "what the turn says"),
        ({"messages": (Message(role="tool", content="other", call_id="t000c0000", name="browse"),)}, "messages"),
        ({"finish": "length"}, "finish"),
        ({"tools": ()}, "tools"),
    ],
)
def test_whatever_differs_from_what_was_sent_and_said_is_named(played, change, says):
    chat, trajectory, exchanges = played
    last = trajectory.turns[1]
    if change.get("logprobs") == "shifted":
        change = {"logprobs": (*last.logprobs[1:], -0.25)}
    broken = trajectory.model_copy(update={"turns": (trajectory.turns[0], last.model_copy(update=change))})
    assert f"turn 1: {says}" in faults(broken, exchanges, chat, DAY)
    with pytest.raises(BrokenTranscript, match=says):
        check_transcript(broken, exchanges, chat, DAY)


def test_a_result_that_the_model_was_not_shown_is_named(played):
    chat, trajectory, exchanges = played
    first = trajectory.turns[0]
    other = first.results[0].model_copy(update={"text": "something else"})
    turns = (first.model_copy(update={"results": (other,)}), trajectory.turns[1])
    assert faults(trajectory.model_copy(update={"turns": turns}), exchanges, chat, DAY) == ["turn 0: results"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5])
def test_a_log_probability_that_is_none_is_named(played, bad):
    chat, trajectory, exchanges = played
    first, last = trajectory.turns
    logprobs = (bad, *last.logprobs[1:])
    turns = (first, last.model_copy(update={"logprobs": logprobs}))
    said = exchanges[1].said.model_copy(update={"logprobs": logprobs})
    found = faults(
        trajectory.model_copy(update={"turns": turns}), (exchanges[0], Exchange(exchanges[1].sent, said)), chat, DAY
    )
    assert "turn 1: a positive or unreal log-probability" in found


def test_a_turn_too_few_or_too_many_is_named(played):
    chat, trajectory, exchanges = played
    fewer = trajectory.model_copy(update={"turns": trajectory.turns[:1]})
    assert faults(fewer, exchanges, chat, DAY) == ["1 turns for 2 calls"]
    assert faults(trajectory, exchanges[:1], chat, DAY) == ["2 turns for 1 calls"]


def test_another_rendering_than_the_chat_formats_is_named(played):
    chat, trajectory, exchanges = played
    first = trajectory.turns[0]
    ids = (7, *first.prompt_ids)
    sent = [e.sent.model_copy(update={"prompt_ids": (7, *e.sent.prompt_ids)}) for e in exchanges]
    turns = (first.model_copy(update={"prompt_ids": ids}), trajectory.turns[1])
    found = faults(
        trajectory.model_copy(update={"turns": turns}),
        [Exchange(s, e.said) for s, e in zip(sent, exchanges, strict=True)],
        chat,
        DAY,
    )
    assert found == ["turn 0: its rendering"]


def test_the_sample_of_checked_steps_is_decided_by_the_key_and_has_its_share():
    keys = [KEY.model_copy(update={"rollout": i}) for i in range(2000)]
    chosen = [k for k in keys if is_checked(k, 0.25)]
    assert 400 < len(chosen) < 600
    assert [k for k in keys if is_checked(k, 0.25)] == chosen
    assert set(chosen) <= {k for k in keys if is_checked(k, 0.5)}
    assert not any(is_checked(k, 0.0) for k in keys)
    assert all(is_checked(k, 1.0) for k in keys)
