"""One chat completion, put together from its chunks or read whole, in one shape.

Nothing is invented: an answer without choices, or a stream that ends without a finish reason, is a fault. Whatever a model
said, reading it never raises anything else.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from cluster.endpoint.browsing import browsing_shown
from cluster.endpoint.fault import Fault, StorableText, of_body
from cluster.endpoint.prices import TokenCount
from cluster.record import Record

Finish = Literal["stop", "length", "refused"]
_FINISHES: dict[str, Finish] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "refused",
}
_ABORTED = frozenset({"abort", "error"})
"""Finish reasons by which servers say that they, not the model, ended the answer."""
THINK_START, THINK_END = "<think>", "</think>"


class EndpointFault(Exception):
    """A request gave no answer."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


class AskedCall(Record):
    """A tool call as the model wrote it; the arguments are raw text."""

    id: StorableText
    name: StorableText
    arguments: StorableText


class Answer(Record):
    """What the server returned for one request."""

    text: StorableText
    reasoning: StorableText
    calls: tuple[AskedCall, ...]
    finish: Finish
    count: TokenCount | None
    """None: the server did not count."""
    model: StorableText
    """The model's name as the server gives it; empty if it does not."""
    system_fingerprint: StorableText
    browsed: StorableText
    """What shows that the provider browsed; empty if nothing does."""


class Assembly:
    """Takes the parts of one answer, in order."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._finish = ""
        self._count: TokenCount | None = None
        self._model = self._system_fingerprint = self._browsed = ""

    def add(self, part: Mapping[str, Any]) -> None:
        """One chunk of a stream, or a whole completion. Raises EndpointFault for an error inside it, or a wrong shape."""
        if part.get("error"):
            raise EndpointFault(of_body(part["error"]))
        self._browsed = self._browsed or browsing_shown(part)
        self._model = _text(part.get("model")) or self._model
        self._system_fingerprint = _text(part.get("system_fingerprint")) or self._system_fingerprint
        if isinstance(part.get("usage"), Mapping):
            self._count = count_of(part["usage"])
        choices = part.get("choices") or ()
        if not isinstance(choices, list | tuple):
            raise EndpointFault(Fault(kind="malformed", detail=f"choices is not a list: {str(choices)[:200]}"))
        for choice in choices[:1]:
            if not isinstance(choice, Mapping):
                raise EndpointFault(Fault(kind="malformed", detail=f"a choice is not an object: {str(choice)[:200]}"))
            self._add_choice(choice)

    def answer(self, streamed: bool) -> Answer:
        """What all parts say. Raises EndpointFault if they are no answer."""
        said = bool(self._text or self._reasoning or self._refusal or self._calls)
        if self._finish in _ABORTED:
            raise EndpointFault(Fault(kind="server", detail=f"the server ended the answer: {self._finish}"))
        if not self._finish and (streamed or not said):
            detail = "the stream ended without a finish reason" if said else "no choices"
            raise EndpointFault(Fault(kind="malformed", detail=f"the answer is not whole: {detail}"))
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        if not reasoning:
            reasoning, text = without_thought(text)
        refusal = "".join(self._refusal)
        return Answer(
            text=text or refusal,
            reasoning=reasoning,
            calls=tuple(
                AskedCall.model_validate(c) for _, c in sorted(self._calls.items()) if c["name"] or c["arguments"]
            ),
            finish="refused" if refusal else _FINISHES.get(self._finish, "stop"),
            count=self._count,
            model=self._model,
            system_fingerprint=self._system_fingerprint,
            browsed=self._browsed,
        )

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        self._finish = _text(choice.get("finish_reason")) or self._finish
        said = choice.get("delta") or choice.get("message") or {}
        if not isinstance(said, Mapping):
            raise EndpointFault(Fault(kind="malformed", detail=f"a message is not an object: {str(said)[:200]}"))
        for into, value in (
            (self._text, said.get("content")),
            (self._reasoning, said.get("reasoning_content") or said.get("reasoning") or _thought(said.get("content"))),
            (self._refusal, said.get("refusal")),
        ):
            if text := _text(value):
                into.append(text)
        calls = said.get("tool_calls") or ()
        for place, call in enumerate(calls if isinstance(calls, list | tuple) else ()):
            if isinstance(call, Mapping):
                self._add_call(call, place)

    def _add_call(self, call: Mapping[str, Any], place: int) -> None:
        index = call.get("index")
        number = index if isinstance(index, int) else place
        known = self._calls.setdefault(number, {"id": "", "name": "", "arguments": ""})
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        known["id"] = known["id"] or _text(call.get("id"))
        # Some servers repeat the name in every chunk, others send it once; none sends it in pieces.
        known["name"] = known["name"] or _text(function.get("name"))
        arguments = function.get("arguments")
        known["arguments"] += json.dumps(arguments) if isinstance(arguments, Mapping) else _text(arguments)


def count_of(usage: Mapping[str, Any]) -> TokenCount:
    """The tokens of a usage object; what it does not hold, or holds in another shape, is 0."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else usage.get("prompt_cache_hit_tokens")
    return TokenCount(
        input=_number(usage.get("prompt_tokens")),
        cached=_number(cached),
        output=_number(usage.get("completion_tokens")),
    )


def without_thought(text: str) -> tuple[str, str]:
    """(reasoning, the rest) of a text that a server without a reasoning parser opened with `<think>`.

    A thought that never ends is all there is. Some templates put the opening mark into the prompt, so that only the closing one is seen.
    """
    thought, end, rest = text.partition(THINK_END)
    if end and (THINK_START not in thought or thought.lstrip().startswith(THINK_START)):
        return thought.lstrip().removeprefix(THINK_START).strip(), rest.lstrip()
    if text.lstrip().startswith(THINK_START):
        return text.lstrip().removeprefix(THINK_START).strip(), ""
    return "", text


def _text(value: Any) -> str:
    """A text, or the texts of a list of parts; anything else is empty."""
    if isinstance(value, list):
        return "".join(_text(part.get("text")) for part in value if isinstance(part, Mapping))
    return value if isinstance(value, str) else ""


def _thought(content: Any) -> str:
    """The thinking parts of a content that is a list of parts."""
    parts = content if isinstance(content, list) else ()
    return "".join(_text(part.get("thinking")) for part in parts if isinstance(part, Mapping))


def _number(value: Any) -> int:
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0
