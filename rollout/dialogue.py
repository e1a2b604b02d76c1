"""The conversation of one step, for token models and for message models.

A token dialogue holds the ids that the engine has seen and appends to them; it never looks back. A message dialogue
holds messages alone. `rendered.py` has the one for templates that cannot append.
"""

import datetime as dt
from collections.abc import Sequence
from typing import Protocol

from rollout.chat import ChatFormat
from rollout.model import Completion
from rollout.tools import ToolSchema
from rollout.trajectory import Message, Transcript
from rollout.turn_parser import ParsedTurn, storable

CHARACTERS_PER_TOKEN = 4
"""Where there is no tokenizer."""
TOKENS_PER_MESSAGE = 6
"""Roles and marks around a message, where there is no tokenizer."""
UNLIMITED = 1_000_000_000
"""The context of a rule-based forecaster, and of an endpoint whose context is not known."""


class Dialogue(Protocol):
    """What a forecast step needs of a conversation."""

    tokenizer: str
    """Fingerprint of tokenizer and chat format; empty for a message dialogue."""
    transcript: Transcript
    """How the conversation reaches the model."""

    def ids(self) -> tuple[int, ...]:
        """The whole context, as the engine is to see it."""
        ...

    def room(self) -> int:
        """Tokens left in the context."""
        ...

    def tokens(self, text: str) -> int:
        """Length of a text by itself."""
        ...

    def cost(self, messages: Sequence[Message], today: dt.date) -> int:
        """Tokens that appending these messages behind a turn would take; `today` is the forecast date."""
        ...

    def append(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> tuple[int, ...]:
        """Append messages before the next call; returns the ids that were added (all of them, if rendered anew)."""
        ...

    def accept(self, completion: Completion) -> ParsedTurn:
        """Take what the model said into the conversation. Ids of its calls are unique in the step."""
        ...


class TokenDialogue:
    """Token-exact: the context is the concatenation of what was rendered and what was sampled."""

    transcript: Transcript = "exact"

    def __init__(self, chat: ChatFormat, max_model_len: int) -> None:
        self._chat = chat
        self._limit = max_model_len
        self._ids: list[int] = []
        self._last: int | None = None
        self._turns = 0
        self._costed: tuple[Sequence[Message], list[int]] = ((), [])
        """What was rendered last to see what it would take: it is what is appended next, and long texts are tokenized once."""
        self.tokenizer = chat.fingerprint

    def ids(self) -> tuple[int, ...]:
        """Everything so far."""
        return tuple(self._ids)

    def room(self) -> int:
        """What the context still holds."""
        return self._limit - len(self._ids)

    def tokens(self, text: str) -> int:
        """Length of a text by itself."""
        return self._chat.tokens(text)

    def cost(self, messages: Sequence[Message], today: dt.date) -> int:
        """Length of the ids that `append` would add behind a turn."""
        self._costed = (list(messages), self._chat.extend(messages, self._last, today))
        return len(self._costed[1])

    def append(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> tuple[int, ...]:
        """The first call opens the conversation and states the tools; later ones only append."""
        if not self._ids:
            added = self._chat.open(messages, tools, today)
        elif list(messages) == self._costed[0]:
            added = self._costed[1]
        else:
            added = self._chat.extend(messages, self._last, today)
        self._costed = ((), [])
        self._ids += added
        return tuple(added)

    def accept(self, completion: Completion) -> ParsedTurn:
        """Sampled ids are appended as they are."""
        self._ids += completion.token_ids
        self._last = completion.token_ids[-1] if completion.token_ids else None
        self._turns += 1
        return self._chat.parse(completion.token_ids).numbered(self._turns - 1)


class MessageDialogue:
    """For models that read messages. What the context holds is estimated, and corrected by what a server counted."""

    tokenizer = ""
    transcript: Transcript = "messages"

    def __init__(self, context: int | None = None) -> None:
        """`context`: tokens that the model can hold; None if that is not known, or without meaning."""
        self._context = UNLIMITED if context is None else context
        self._used = 0
        self._turns = 0

    def ids(self) -> tuple[int, ...]:
        """None."""
        return ()

    def room(self) -> int:
        """What the context is thought to hold still."""
        return self._context - self._used

    def tokens(self, text: str) -> int:
        """An estimate."""
        return -(-len(text) // CHARACTERS_PER_TOKEN)

    def cost(self, messages: Sequence[Message], today: dt.date) -> int:  # noqa: ARG002 - the protocol's signature
        """An estimate."""
        return sum(self.tokens(m.content) + TOKENS_PER_MESSAGE for m in messages)

    def append(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> tuple[int, ...]:
        """Adds no ids."""
        if not self._turns:
            self._used += sum(self.tokens(f"{t.name}{t.description}{t.parameters}") for t in tools)
        self._used += self.cost(messages, today)
        return ()

    def accept(self, completion: Completion) -> ParsedTurn:
        """The model has said it in words already."""
        calls = tuple(storable(call) for call in completion.tool_calls)
        if completion.input_tokens:
            self._used = completion.input_tokens + completion.output_tokens
        else:
            self._used += self.tokens(completion.text) + sum(self.tokens(c.arguments) for c in calls)
        self._turns += 1
        said = ParsedTurn(text=completion.text, reasoning=completion.reasoning, tool_calls=calls)
        return said.numbered(self._turns - 1)
