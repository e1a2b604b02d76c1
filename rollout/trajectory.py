"""Everything one forecast step did, token by token.

In an `exact` transcript the concatenation of `prompt_ids + sampled_ids` over the turns is exactly what the engine saw and
produced: nothing is tokenized twice. In a `rendered` one each turn holds the whole prompt that was sent, and turns are not
to be concatenated. Rule-based forecasters and message-only models leave the ids empty; their trajectories are re-rendered
for training.
"""

import datetime as dt
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from cluster.record import Record

Role = Literal["system", "user", "assistant", "tool"]
Transcript = Literal["exact", "rendered", "messages"]
"""How a step's conversation reached its model: ids that only grow, ids rendered anew each turn, or no ids at all."""
FinishReason = Literal["stop", "length", "abort", "refused", "context-full", "bad-request", "browsed"]
"""The last four are an endpoint's and end the step. `refused`: the provider's content policy or the model itself declined.
`context-full`: the conversation exceeds the server's context. `bad-request`: the server takes this conversation for malformed.
`browsed`: the provider searched by itself, so nothing of the answer may count."""


class ToolCall(Record):
    """One call as the model made it; `arguments` is the raw JSON text, possibly malformed."""

    id: str
    name: str
    arguments: str


def call_id(turn: int, number: int) -> str:
    """The id of a step's call; nine letters and digits, because some chat templates take no others."""
    return f"t{turn:03}c{number:04}"


MalformedKind = Literal["bad-json", "cut-off", "parser-error"]
"""Why a call could not be read: it is not JSON with a name and arguments, the turn was cut inside it, or the model family's
parser failed on it."""


class MalformedCall(Record):
    """A call that could not be read at all, so that it has no name and no arguments."""

    kind: MalformedKind
    reason: str


class Message(Record):
    """One chat message. `tool_calls` and `reasoning` only on an assistant's, `call_id` and `name` only on a tool's."""

    role: Role
    content: str
    reasoning: str = ""
    """Of this step's earlier turns, for chats that are rendered anew and endpoints that ask for it; templates may drop it."""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


class ShownArticle(Record):
    """An article of which the model was shown something, and the day it was published."""

    article_id: str
    day: dt.date


class ToolResult(Record):
    """What one call returned to the model."""

    call_id: str
    name: str
    text: str
    """Exactly what the model was shown."""
    error: str = ""
    """Empty when the call succeeded, else a short stable name: `unknown-tool`, `bad-json`, `bad-arguments`, `budget`,
    `not-returned`, `time-out`, `exit-status`, or a MalformedKind."""
    shown: tuple[ShownArticle, ...] = ()
    cut_characters: int = 0
    """Characters that did not fit a bound or the context; the text says so too."""
    seconds: float = 0.0


class Turn(Record):
    """What was added to the context, what the model then produced, and what its calls returned."""

    messages: tuple[Message, ...]
    """The messages that were added before sampling (first turn: system and user; later: tool results or a demand)."""
    tools: tuple[str, ...] = ()
    """Names of the tools offered."""
    prompt_ids: tuple[int, ...] = ()
    """Token ids this turn added to the context before sampling (mask 0); in a rendered transcript the whole context."""
    sampled_ids: tuple[int, ...] = ()
    """Token ids from the engine, including a stop token (mask 1)."""
    logprobs: tuple[float, ...] = ()
    """One per sampled id, natural log, of the sampling distribution."""
    text: str
    """The assistant's visible text without reasoning and call markup."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[MalformedCall, ...] = ()
    """One per call that could not be read."""
    results: tuple[ToolResult, ...] = ()
    finish: FinishReason = "stop"
    seconds: float = 0.0
    """Latency of the model call."""
    cached_tokens: int = 0
    engine: str = ""
    weights: str = ""
    """Fingerprint of the weights that sampled this turn."""

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if len(self.logprobs) != len(self.sampled_ids):
            raise ValueError(f"{len(self.sampled_ids)} sampled ids but {len(self.logprobs)} log-probabilities")
        return self

    def assistant(self) -> Message:
        """What the model said, as a chat message."""
        return Message(role="assistant", content=self.text, tool_calls=self.tool_calls)


class Trajectory(Record):
    """The turns of one step, in order."""

    turns: tuple[Turn, ...]
    tokenizer: str = ""
    """Fingerprint of tokenizer and chat template; empty when no tokens were involved."""
    transcript: Transcript = "messages"

    def token_ids(self) -> list[int]:
        """All ids in order, as the engine saw them. Raises ValueError for a rendered transcript, which has no such order."""
        if self.transcript == "rendered":
            raise ValueError("a rendered transcript is not a sequence of tokens that only grew")
        return [i for turn in self.turns for i in (*turn.prompt_ids, *turn.sampled_ids)]

    def mask(self) -> list[int]:
        """1 where an id was sampled, 0 where it was given; aligned with `token_ids`."""
        return [m for turn in self.turns for m in [0] * len(turn.prompt_ids) + [1] * len(turn.sampled_ids)]

    def messages(self) -> Iterator[Message]:
        """The chat as messages: what was added, then what the model said, turn by turn."""
        for turn in self.turns:
            yield from turn.messages
            yield turn.assistant()

    def shown(self) -> Iterator[ShownArticle]:
        """Every article of which something was shown, in order, with repetitions."""
        for turn in self.turns:
            for result in turn.results:
                yield from result.shown
