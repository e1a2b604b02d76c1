"""Conversations whose template cannot append: the whole chat is rendered anew each turn.

The model then reads its earlier turns as the template rewrites them, not as it sampled them. Each prompt is kept as it was
sent, but the turns are no one sequence of tokens; such a transcript is marked and never trained on token by token.
"""

import datetime as dt
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from cluster.failures import SettingsError
from rollout.chat_template import ChatTemplate, joined
from rollout.model import Completion
from rollout.stops import engine_stops
from rollout.tools import ToolSchema
from rollout.trajectory import Message, ToolCall, Transcript, call_id
from rollout.turn_parser import ParsedTurn, TurnParser

_ANY_DAY = dt.date(2001, 2, 3)
_USER = Message(role="user", content="qz4demand")


class RenderedFormat:
    """A chat template that is asked for the whole conversation, every turn."""

    def __init__(
        self,
        tokenizer: Any,
        parser: TurnParser,
        identity: str = "",
        told_in_words: bool = False,
        stops: Sequence[int] = (),
    ) -> None:
        """With `told_in_words` for templates that know no tools; `stops`: more ids that end a turn.

        Raises SettingsError that says what the template cannot do.
        """
        self._template = ChatTemplate(tokenizer, told_in_words)
        self._parser = parser
        call = ToolCall(id=call_id(0, 0), name="search", arguments='{"query": "q"}')
        called = (_USER, Message(role="assistant", content="", tool_calls=(call,)))
        result = Message(role="tool", content="qz1result", call_id=call.id, name=call.name)
        demanded = [*called, result, _USER]
        try:
            self._joins = False
            text = self._template.render(demanded, (), _ANY_DAY)
        except SettingsError:
            self._joins = True
            text = self._template.render(joined(demanded), (), _ANY_DAY)
        if result.content not in text or text.count(_USER.content) != 2:
            raise SettingsError("the chat template drops a tool's result or a demand behind it; set model.chat=hermes")
        spoken = (_USER, Message(role="assistant", content="w"))
        if closing := self._last_control(spoken):
            ends = [closing, self._last_control(called)]
        else:
            # Only the beginning of the next turn ends such a turn.
            ends = [self._next_control(spoken, _USER), self._next_control(called, result)]
        own = {self._template.encode(end)[0] for end in ends if end}
        self.stop_ids: tuple[int, ...] = tuple(sorted(own | engine_stops(tokenizer, stops)))
        if not self.stop_ids:
            raise SettingsError("neither the chat template nor the tokenizer ends a turn with a token of its own")
        way = "rendered-words-1" if told_in_words else "rendered-1"
        self.fingerprint = hashlib.sha256(f"{way}\0{tokenizer.chat_template}\0{identity}".encode()).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> list[int]:
        """Ids of the whole conversation, up to where the assistant begins."""
        said = joined(messages) if self._joins else messages
        return self._template.encode(self._template.render(said, tools, today))

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Decodes without the stop id and parses. Never raises."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        return self._parser.parse(self._template.decode(ids[:-1] if ended else ids), self._template.thinking, ended)

    def tokens(self, text: str) -> int:
        """Length of a text by itself."""
        return len(self._template.encode(text))

    def _next_control(self, messages: Sequence[Message], later: Message) -> str:
        """The control token that `later` puts behind a conversation, if it puts one."""
        before = self._template.render(messages, (), _ANY_DAY, generate=False).rstrip()
        whole = self._template.render([*messages, later], (), _ANY_DAY, generate=False)
        found = self._template.control.search(whole, len(before))
        return found[0] if found else ""

    def _last_control(self, messages: Sequence[Message]) -> str:
        """The control token with which a conversation ends, if it ends with one."""
        text = self._template.render(messages, (), _ANY_DAY, generate=False).rstrip()
        found = [m for m in self._template.control.finditer(text) if m.end() == len(text)]
        return found[-1][0] if found else ""


class RenderedDialogue:
    """The conversation of one step as messages, rendered as a whole before each call."""

    transcript: Transcript = "rendered"

    def __init__(self, chat: RenderedFormat, max_model_len: int) -> None:
        self._chat = chat
        self._limit = max_model_len
        self._messages: list[Message] = []
        self._tools: tuple[ToolSchema, ...] = ()
        self._ids: tuple[int, ...] = ()
        self._turns = 0
        self.tokenizer = chat.fingerprint

    def ids(self) -> tuple[int, ...]:
        """The last prompt, and what was sampled behind it."""
        return self._ids

    def room(self) -> int:
        """What the context still holds."""
        return self._limit - len(self._ids)

    def tokens(self, text: str) -> int:
        """Length of a text by itself."""
        return self._chat.tokens(text)

    def cost(self, messages: Sequence[Message], today: dt.date) -> int:
        """By how much the context would grow; a template that drops earlier reasoning may even make it smaller."""
        return len(self._chat.render(self._with(messages), self._tools, today)) - len(self._ids)

    def append(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> tuple[int, ...]:
        """Renders everything; returns the whole prompt. The first call states the tools."""
        if not self._messages:
            self._tools = tuple(tools)
        self._messages = self._with(messages)
        self._ids = tuple(self._chat.render(self._messages, self._tools, today))
        return self._ids

    def accept(self, completion: Completion) -> ParsedTurn:
        """Kept as messages, with this step's reasoning where the template takes it."""
        parsed = self._chat.parse(completion.token_ids).numbered(self._turns)
        self._turns += 1
        self._ids += completion.token_ids
        calls = tuple(c.model_copy(update={"arguments": _object(c.arguments)}) for c in parsed.tool_calls)
        said = Message(role="assistant", content=parsed.text, reasoning=parsed.reasoning, tool_calls=calls)
        self._messages.append(said)
        return parsed

    def _with(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation and what follows. A result without a call (it could not be read) is given one: templates want it."""
        said = self._messages[-1:]
        results = [m for m in messages if m.role == "tool"]
        if not said or said[0].role != "assistant" or len(results) == len(said[0].tool_calls):
            return [*self._messages, *messages]
        known = {c.id for c in said[0].tool_calls}
        unread = [
            ToolCall(id=m.call_id, name=m.name or "tool", arguments="{}") for m in results if m.call_id not in known
        ]
        whole = said[0].model_copy(update={"tool_calls": (*said[0].tool_calls, *unread)})
        return [*self._messages[:-1], whole, *messages]


def _object(arguments: str) -> str:
    """The arguments as a JSON object; templates cannot write what is none."""
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None
    return arguments if isinstance(read, dict) else json.dumps({"unread": arguments[:1000]})
