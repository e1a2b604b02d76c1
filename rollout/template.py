"""Conversations as a tokenizer's own chat template writes them, kept token-exact.

A template renders a whole conversation; here it is rendered once, and afterwards only what it puts behind an
assistant's turn is taken from it, with an anchor standing for what was sampled. Whether a template rewrites earlier
turns (many drop earlier reasoning) therefore does not matter: they are in the context as they were sampled. What does
matter is probed before the first use, and a template that fails is refused with the reason. The only day that a template
is told is the forecast date.
"""

import datetime as dt
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from cluster.failures import SettingsError
from rollout.chat_template import ChatTemplate, joined
from rollout.stops import engine_stops
from rollout.tools import TOOLS, ToolSchema
from rollout.trajectory import Message, ToolCall, call_id
from rollout.turn_parser import ParsedTurn, TurnParser

Anchoring = Literal["calls", "call", "words"]
"""How the turn before tool results is rendered: a call for each result; one for all where a template takes no more; `words`
where it renders no calls at all."""

_ANCHOR = "qz7anchor7zq"
"""Stands for what was sampled; plain letters, so that no template escapes it."""
_ANY_DAY = dt.date(2001, 2, 3)
_SYSTEM, _USER = Message(role="system", content="s"), Message(role="user", content="u")
_RESULTS = (
    Message(role="tool", content="qz1result", call_id=call_id(0, 0), name="search"),
    Message(role="tool", content="qz2result", call_id=call_id(0, 1), name="python"),
    Message(role="tool", content="qz3result", call_id=call_id(0, 2), name="tool"),
)
_DEMAND = Message(role="user", content="qz4demand")


class TemplateFormat:
    """The tokenizer's own chat template, if it says tools, results and demands, and appends them."""

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
        self._tokenizer = tokenizer
        self._parser = parser
        self._token = self._template.control
        self._closing = _first(self._token, self._behind([], "words", _ANY_DAY, generate=False))
        """Control token at the end of an assistant's turn; empty where only the next turn's beginning ends it."""
        self._anchoring, self._joins = self._probed()
        # What closes the last turn is sampled; a template may close earlier turns in another way.
        ends = (self._closing or self._following([_DEMAND], _ANY_DAY), self._following(_RESULTS[:1], _ANY_DAY))
        self._check_parser()
        own = {self._template.encode(end)[0] for end in ends}
        self.stop_ids: tuple[int, ...] = tuple(sorted(own | engine_stops(tokenizer, stops)))
        way = "words-1" if told_in_words else "template-2"
        self.fingerprint = hashlib.sha256(f"{way}\0{tokenizer.chat_template}\0{identity}".encode()).hexdigest()

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> list[int]:
        """As the template renders messages and tool schemas."""
        return self._template.encode(self.rendered(messages, tools, today))

    def extend(self, messages: Sequence[Message], after: int | None, today: dt.date) -> list[int]:
        """What the template puts behind an assistant's turn when these messages follow it."""
        ids = self._template.encode(self._following(messages, today))
        return ids[1:] if after == ids[0] else ids

    def assistant(self, message: Message, today: dt.date) -> list[int]:
        """The text the template gives an assistant's message, and the token that ends it.

        Raises SettingsError where the template writes something else behind the beginning of an assistant's turn.
        """
        begun = self._template.render([_USER], (), today)
        whole = self._template.render([_USER, message], (), today, generate=False)
        shared = _common(begun, whole)
        # Only white space may differ: a reasoning block that is begun with a new line may be written down without one.
        if begun[len(shared) :].strip():
            raise SettingsError(
                "the chat template begins an assistant's turn in another way than it writes one down; set model.chat=hermes"
            )
        for dropped in range(len(message.tool_calls)):
            calls = tuple(c for i, c in enumerate(message.tool_calls) if i != dropped)
            fewer = message.model_copy(update={"tool_calls": calls})
            if self._template.render([_USER, fewer], (), today, generate=False) == whole:
                raise SettingsError("the chat template drops a tool call; set model.chat=hermes")
        said = whole[len(shared) :]
        results = [Message(role="tool", content="r", call_id=c.id, name=c.name) for c in message.tool_calls]
        stop = self._template.encode(self._following(results or [_DEMAND], today))[0]
        if self._closing:
            token = self._closing if not results else self._tokenizer.convert_ids_to_tokens(stop)
            said, stop = said[: said.rindex(token)], self._template.encode(token)[0]
        return [*self._template.encode(said), stop]

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Decodes without the stop id and parses."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        return self._parser.parse(self._template.decode(ids[:-1] if ended else ids), self._template.thinking, ended)

    def tokens(self, text: str) -> int:
        """Length of a text by itself."""
        return len(self._template.encode(text))

    def rendered(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> str:
        """A whole conversation, up to where the assistant begins, as the template alone would write it."""
        return self._template.render(messages, tools, today)

    def _following(self, messages: Sequence[Message], today: dt.date) -> str:
        """Text behind what was sampled; it begins with a control token, the one that ends the sampled turn."""
        said = joined(messages) if self._joins else messages
        return self._extension(said, self._anchoring if messages[0].role == "tool" else "words", today)

    def _extension(
        self,
        messages: Sequence[Message],
        anchoring: Anchoring,
        today: dt.date,
        before: Sequence[Message] = (_USER,),
        tools: Sequence[ToolSchema] = (),
    ) -> str:
        behind = self._behind(messages, anchoring, today, before=before, tools=tools)
        ends = [found.start() for found in self._token.finditer(behind)]
        if not ends:
            raise SettingsError(
                f"the chat template puts no control token of this tokenizer behind an assistant's turn, but {behind[:80]!r}"
            )
        if anchoring == "words":
            return behind[ends[0] :]
        # Behind the anchor stands the rest of the call, which was sampled; the same call at the end of a conversation tells
        # it from what follows.
        last = self._behind(messages, anchoring, today, before=before, tools=tools, generate=False, answered=False)
        sampled = _common(last, behind)
        if not self._closing:
            closed = len(sampled)
        elif self._closing in sampled:
            closed = sampled.index(self._closing)
        else:
            closed = max((end for end in ends if end < len(sampled)), default=len(sampled))
        if closed not in ends:
            raise SettingsError(
                f"the chat template does not end a tool call with a control token, but with {last[:80]!r}"
            )
        return behind[closed:]

    def _behind(
        self,
        messages: Sequence[Message],
        anchoring: Anchoring,
        today: dt.date,
        before: Sequence[Message] = (_USER,),
        tools: Sequence[ToolSchema] = (),
        generate: bool = True,
        answered: bool = True,
    ) -> str:
        """Text behind the anchor in an assistant's turn that `messages` follow (unless not `answered`)."""
        said = Message(role="assistant", content=_ANCHOR)
        if anchoring != "words":
            results = [m for m in messages if m.role == "tool"]
            if anchoring == "call":
                results = results[:1]
            queries = ["q"] * (len(results) - 1) + [_ANCHOR]
            calls = [
                # A result repeats the name that a model gave; it must not be able to name the anchor.
                ToolCall(id=m.call_id, name=m.name.replace(_ANCHOR, ""), arguments=json.dumps({"query": q}))
                for m, q in zip(results, queries, strict=True)
            ]
            said = Message(role="assistant", content="", tool_calls=tuple(calls))
        following = messages if answered else ()
        whole = self._template.render([*before, said, *following], tools, today, generate)
        _, found, behind = whole.partition(_ANCHOR)
        if not found:
            raise SettingsError("the chat template drops what an assistant said or called in an earlier turn")
        return behind

    def _check_parser(self) -> None:
        """Raises SettingsError unless the parser reads the call that the template writes."""
        if self._anchoring == "words":
            return
        arguments = {"query": "qz5query", "top_k": 3}
        call = ToolCall(id=call_id(0, 0), name="search", arguments=json.dumps(arguments))
        spoken = Message(role="assistant", content="", tool_calls=(call,))
        whole = self._template.render([_USER, spoken], (), _ANY_DAY, generate=False)
        begun, thinking = self._template.render([_USER], (), _ANY_DAY), self._template.thinking
        if not whole.startswith(begun.rstrip()):
            # It is begun in a thought that is not written down.
            begun, thinking = self._template.render([_USER], (), _ANY_DAY, generate=False), False
        said = whole[len(_common(begun, whole)) :]
        if self._closing and self._closing in said:
            said = said[: said.rindex(self._closing)]
        parsed = self._parser.parse(said, thinking)
        if [(c.name, _json(c.arguments)) for c in parsed.tool_calls] != [("search", arguments)]:
            raise SettingsError(
                f"the tool parser {self._parser.name} does not read the calls of the chat template, such as {said!r}; set "
                "model.tool_parser, or model.chat=hermes"
            )

    def _probed(self) -> tuple[Anchoring, bool]:
        """The first anchoring with which the template says everything a step may have to append, and whether a demand
        behind results has to be joined to them."""
        self._probe([_DEMAND], "words")
        reasons: list[str] = []
        for anchoring, joins in itertools.product(get_args(Anchoring), (False, True)):
            try:
                for count in range(1, len(_RESULTS) + 1):
                    self._probe(_RESULTS[:count], anchoring)
                    demanded = [*_RESULTS[:count], _DEMAND]
                    self._probe(joined(demanded) if joins else demanded, anchoring)
                self._probe(_RESULTS[2:], anchoring)
            except SettingsError as error:
                reasons.append(f"{anchoring}: {error}")
            else:
                chosen: Anchoring = anchoring
                return chosen, joins
        raise SettingsError(f"the chat template cannot append tool results ({reasons[0]}); set model.chat=hermes")

    def _probe(self, messages: Sequence[Message], anchoring: Anchoring) -> None:
        """Raises SettingsError unless `messages` are appended whole, and in the same way wherever the turn stands."""
        text = self._extension(messages, anchoring, _ANY_DAY)
        if lost := [m for m in messages if text.count(m.content) != 1]:
            raise SettingsError(f"it does not say a {lost[0].role} message once behind {len(messages) - 1} others")
        call = ToolCall(id=call_id(0, 9), name="search", arguments='{"query": "q"}')
        result = Message(role="tool", content="r", call_id=call.id, name="search")
        earlier = (_SYSTEM, _USER, Message(role="assistant", content="w", tool_calls=(call,)), result)
        for before, tools in (((_SYSTEM, _USER), tuple(TOOLS.values())), (earlier, ())):
            if self._extension(messages, anchoring, _ANY_DAY, before, tools) != text:
                raise SettingsError("what it puts behind a turn depends on what stands before it")


def _common(one: str, other: str) -> str:
    """What both texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[0] if found else ""
