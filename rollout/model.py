"""The one interface between a forecast step and whatever answers it.

A token model gets `prompt_ids` (the whole context) and returns sampled ids; a message model (a rule-based forecaster
or a remote endpoint) reads `messages` and returns text and calls. Either raises InfrastructureError when the attempt
must be repeated elsewhere.
"""

import datetime as dt
from typing import Protocol

from cluster.record import Record
from rollout.events.event import EventPrompt
from rollout.record import Mode
from rollout.trajectory import FinishReason, Message, ToolCall


class SampleRequest(Record):
    """One model call."""

    session: str
    """Names the step or chain: calls of one session go to one engine while it lives."""
    event: EventPrompt
    date: dt.date
    mode: Mode
    messages: tuple[Message, ...]
    """The whole conversation so far."""
    tools: tuple[str, ...]
    """Names of the tools offered in this turn."""
    prompt_ids: tuple[int, ...] = ()
    """The whole context for a token model; empty for a message model."""
    max_tokens: int


class Completion(Record):
    """What one model call returned. Token models fill the ids, message models `text` and `tool_calls`."""

    text: str = ""
    reasoning: str = ""
    """Of a message model: what it thought aloud, kept apart from its text."""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: FinishReason = "stop"
    detail: str = ""
    """For a person: why the turn ended as it did, where there is more to say."""
    input_tokens: int = 0
    """Of a message model: tokens of the whole prompt, as its server counted them."""
    output_tokens: int = 0
    """Of a message model: tokens that were generated, as its server counted them."""
    cached_tokens: int = 0
    seconds: float = 0.0
    price: float = 0.0
    """US dollars."""
    engine: str = ""
    weights: str = ""


class Model(Protocol):
    """Anything that answers a request."""

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion. Raises InfrastructureError when the attempt must be repeated elsewhere."""
        ...

    async def release(self, session: str) -> None:
        """The session has ended; forget it. Never raises."""
        ...
