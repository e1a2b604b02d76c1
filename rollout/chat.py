"""Messages ↔ token ids, so that a transcript stays token-exact.

A format renders the opening of a conversation once and afterwards only what is appended; sampled ids are kept as the
engine returned them and are never tokenized again. Text from articles, programs or notebooks is data: it can never
become a control token, so no article can open a turn of its own.

`hermes` is our format: ChatML turns, tools described in the system turn, calls as `<tool_call>{"name": …,
"arguments": …}</tool_call>`. `template` is the tokenizer's own chat template, used where it renders tools and where
appending a turn only appends text.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from cluster.failures import SettingsError
from cluster.record import Record
from rollout.tools import ToolSchema
from rollout.trajectory import Message, ToolCall

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_SENTINEL = "\u2021anchor\u2021"
"""Stands for an assistant's text while a template is asked what it puts after one; no template contains it."""


class ParsedTurn(Record):
    """What a sampled turn says."""

    text: str
    """Visible text without reasoning and call markup."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """One reason for each call that could not be parsed."""


class ChatFormat(Protocol):
    """How one tokenizer's conversations become ids."""

    fingerprint: str
    """Hash of the tokenizer and of the way it is used."""
    stop_ids: tuple[int, ...]
    """Ids that end an assistant's turn."""

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of the opening messages and tools, up to where the assistant begins."""
        ...

    def extend(self, messages: Sequence[Message], after: int | None) -> list[int]:
        """Ids that append messages behind an assistant's turn whose last sampled id is `after`, up to its next beginning.

        If the turn did not end with a stop id (it was cut), the ids begin by closing it.
        """
        ...

    def assistant(self, message: Message) -> list[int]:
        """Ids an assistant would have to sample to say `message`, with the stop id."""
        ...

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """What sampled ids say. Never raises: what cannot be parsed is a malformed call or text."""
        ...


class TurnParser:
    """Text of a turn → reasoning, calls and visible text, by vLLM's own parsers."""

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str) -> None:
        # Imported here: vLLM takes seconds to import and only processes that parse need it.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        # The parsers log a traceback for every malformed call; here a malformed call is data.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest(messages=[], model="")
        try:
            self._tool_parser = ToolParserManager.get_tool_parser(tool_parser)
            self._reasoning_parser = (
                ReasoningParserManager.get_reasoning_parser(reasoning_parser) if reasoning_parser else None
            )
        except KeyError as error:
            raise SettingsError(f"model.tool_parser or model.reasoning_parser is not one of vLLM's: {error}") from error

    def parse(self, text: str) -> ParsedTurn:
        """Never raises: a parser's own exception is a malformed call."""
        reasoning = ""
        if self._reasoning_parser is not None:
            thought, said = self._reasoning_parser(self._tokenizer).extract_reasoning(text, self._request)
            reasoning, text = thought or "", said or ""
        parser = self._tool_parser(self._tokenizer)
        try:
            found = parser.extract_tool_calls(text, self._request)
        except Exception as error:  # noqa: BLE001 - foreign parsers raise anything on malformed text, which is data here
            return ParsedTurn(text=text, reasoning=reasoning, malformed=(f"{type(error).__name__}: {error}",))
        if found.tools_called:
            calls = tuple(
                ToolCall(id=f"{i}", name=c.function.name, arguments=c.function.arguments)
                for i, c in enumerate(found.tool_calls)
            )
            return ParsedTurn(text=(found.content or "").strip(), reasoning=reasoning, tool_calls=calls)
        start = getattr(parser, "tool_call_start_token", None)
        malformed = ("the call is not valid JSON with a name and arguments",) if start and start in text else ()
        return ParsedTurn(text=text.strip(), reasoning=reasoning, malformed=malformed)


class HermesFormat:
    """Our format, for any tokenizer that has the ChatML turn tokens."""

    def __init__(self, tokenizer: Any, parser: TurnParser, identity: str = "") -> None:
        vocabulary = tokenizer.get_vocab()
        missing = [t for t in (IM_START, IM_END) if t not in vocabulary]
        if missing:
            raise SettingsError(
                f"the tokenizer has no {' and '.join(missing)}; set model.chat=template or take another model"
            )
        self._tokenizer = tokenizer
        self._parser = parser
        self._start, self._end = vocabulary[IM_START], vocabulary[IM_END]
        self.stop_ids: tuple[int, ...] = (self._end,)
        self.fingerprint = hashlib.sha256(f"hermes-1\0{identity}".encode()).hexdigest()

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Tools stand at the end of the first system turn, one line each."""
        ids: list[int] = []
        rest = list(messages)
        if tools:
            lines = "\n".join(tool.summary for tool in tools)
            note = f'Tools:\n{lines}\nCall one with {CALL_START}{{"name": ..., "arguments": {{...}}}}{CALL_END}'
            first = rest.pop(0) if rest and rest[0].role == "system" else Message(role="system", content="")
            ids += self._turn("system", f"{first.content}\n\n{note}".strip())
        for message in rest:
            ids += self._turn(message.role, message.content)
        return ids + self._begin()

    def extend(self, messages: Sequence[Message], after: int | None) -> list[int]:
        """Closes a cut turn, then appends whole turns."""
        ids = [] if after == self._end else [self._end]
        ids += self._text("\n")
        for message in messages:
            ids += self._turn(message.role, message.content)
        return ids + self._begin()

    def assistant(self, message: Message) -> list[int]:
        """Text, then calls, then the end of the turn."""
        calls = [
            f'{CALL_START}{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}{CALL_END}'
            for c in message.tool_calls
        ]
        text = "\n".join(part for part in (message.content, *calls) if part)
        return [*self._text(text), self._end]

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Decodes without the stop id and parses."""
        return self._parser.parse(_decode(self._tokenizer, ids, self.stop_ids))

    def _begin(self) -> list[int]:
        return [self._start, *self._text("assistant\n")]

    def _turn(self, role: str, content: str) -> list[int]:
        return [self._start, *self._text(f"{role}\n{content}"), self._end, *self._text("\n")]

    def _text(self, text: str) -> list[int]:
        # Control tokens inside the text are encoded as the characters they are written with.
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


class TemplateFormat:
    """The tokenizer's own chat template, where appending a turn only appends text."""

    def __init__(self, tokenizer: Any, parser: TurnParser, identity: str = "") -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._control = [t for t in tokenizer.get_added_vocab() if t.strip()]
        self._after = self._remainder([])
        closing = self._encode(self._after)
        if not closing:
            raise SettingsError("the chat template puts nothing behind an assistant's turn; set model.chat=hermes")
        self.stop_ids: tuple[int, ...] = tuple({closing[0], tokenizer.eos_token_id})
        self.fingerprint = hashlib.sha256(f"template-1\0{tokenizer.chat_template}\0{identity}".encode()).hexdigest()

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """As the template renders messages and tool schemas."""
        rendered = self._render([_plain(m, self._inert) for m in messages], [_schema(t) for t in tools])
        return self._encode(rendered)

    def extend(self, messages: Sequence[Message], after: int | None) -> list[int]:
        """What the template puts behind an assistant's turn when these messages follow it."""
        ids = self._encode(self._remainder([_plain(m, self._inert) for m in messages]))
        return ids[1:] if after == ids[0] else ids

    def assistant(self, message: Message) -> list[int]:
        """The text the template gives an assistant's message, and the token that closes it."""
        user = {"role": "user", "content": "x"}
        opening = self._render([user])
        whole = self._render([user, _plain(message, self._inert)], generate=False)
        if not whole.startswith(opening) or not whole.endswith(self._after):
            raise SettingsError("the chat template does not only append an assistant's turn; set model.chat=hermes")
        said = whole[len(opening) : len(whole) - len(self._after)]
        return [*self._encode(said), self._encode(self._after)[0]]

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Decodes without the stop id and parses."""
        return self._parser.parse(_decode(self._tokenizer, ids, self.stop_ids))

    def _remainder(self, messages: list[dict[str, Any]]) -> str:
        """Text behind an assistant's words when `messages` follow."""
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _SENTINEL}]
        closed = self._render(before, generate=False)
        whole = self._render([*before, *messages]) if messages else closed
        head, found, _ = closed.partition(_SENTINEL)
        if not found or not whole.startswith(head + _SENTINEL):
            raise SettingsError("the chat template rewrites earlier turns; set model.chat=hermes")
        return whole[len(head) + len(_SENTINEL) :]

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, generate: bool = True
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generate, tokenize=False
        )
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _inert(self, text: str) -> str:
        """The text with a zero-width space inside every control token that it spells."""
        for token in self._control:
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text


def load_chat(
    path: Path, kind: Literal["auto", "template", "hermes"], tool_parser: str, reasoning_parser: str, identity: str
) -> ChatFormat:
    """The format of the tokenizer in `path`. `identity` is the fingerprint of that folder.

    Raises SettingsError that says what the tokenizer lacks.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    parser = TurnParser(tokenizer, tool_parser, reasoning_parser)
    if kind == "hermes" or (kind == "auto" and not _template_has_tools(tokenizer)):
        return HermesFormat(tokenizer, parser, identity)
    return TemplateFormat(tokenizer, parser, identity)


def _template_has_tools(tokenizer: Any) -> bool:
    """Whether the tokenizer's template mentions a tool that it is given."""
    if not tokenizer.chat_template:
        return False
    probe = {"type": "function", "function": {"name": "probe_tool", "description": "", "parameters": {}}}
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[probe], tokenize=False)
    return "probe_tool" in rendered


def _decode(tokenizer: Any, ids: Sequence[int], stop_ids: Sequence[int]) -> str:
    kept = list(ids[:-1]) if ids and ids[-1] in stop_ids else list(ids)
    return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _plain(message: Message, inert: Callable[[str], str]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": inert(message.content)}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        plain |= {"tool_call_id": message.call_id, "name": message.name}
    return plain


def _schema(tool: ToolSchema) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
