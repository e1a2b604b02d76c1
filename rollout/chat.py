"""Messages ↔ token ids, so that a transcript stays token-exact.

A format renders the opening of a conversation once and afterwards only what is appended; sampled ids are kept as the
engine returned them and are never tokenized again. Text from articles, programs or notebooks is data: it can never
become a control token, so no article can open a turn of its own.

`hermes` is our format: ChatML turns, tools described in the system turn, calls as `<tool_call>{"name": …,
"arguments": …}</tool_call>`; a tokenizer without ChatML's tokens gets the same inside the
turns of its own template. `template` is the tokenizer's own chat template, where it can say all that a step may have to
say. `today` is the forecast date: the only day that a format may tell a model.
"""

import datetime as dt
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from cluster.failures import SettingsError
from rollout.chat_template import ToolsNotRendered
from rollout.families import chosen_parsers
from rollout.rendered import RenderedFormat
from rollout.stops import engine_stops, generation_stops
from rollout.template import TemplateFormat
from rollout.tools import ToolSchema
from rollout.tools_in_words import spoken, tools_note
from rollout.trajectory import Message
from rollout.turn_parser import ParsedTurn, TurnParser

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

logger = logging.getLogger(__name__)


class ChatFormat(Protocol):
    """How one tokenizer's conversations become ids."""

    fingerprint: str
    """Hash of the tokenizer and of the way it is used."""
    stop_ids: tuple[int, ...]
    """Ids that end an assistant's turn: the format's own, and those at which an engine stops unasked."""

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> list[int]:
        """Ids of the opening messages and tools, up to where the assistant begins."""
        ...

    def extend(self, messages: Sequence[Message], after: int | None, today: dt.date) -> list[int]:
        """Ids that append messages behind an assistant's turn whose last sampled id is `after`, up to its next beginning.

        If the turn did not end with a stop id (it was cut), the ids begin by closing it.
        """
        ...

    def assistant(self, message: Message, today: dt.date) -> list[int]:
        """Ids an assistant would have to sample to say `message`, with the stop id."""
        ...

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """What sampled ids say. Never raises: what cannot be parsed is a malformed call or text."""
        ...

    def tokens(self, text: str) -> int:
        """Length of a text by itself."""
        ...


class HermesFormat:
    """Our format, for any tokenizer that has the ChatML turn tokens."""

    def __init__(self, tokenizer: Any, parser: TurnParser, identity: str = "", stops: Sequence[int] = ()) -> None:
        """`stops`: more ids that end a turn."""
        vocabulary = tokenizer.get_vocab()
        missing = [t for t in (IM_START, IM_END) if t not in vocabulary]
        if missing:
            raise SettingsError(
                f"the tokenizer has no {' and '.join(missing)}; set model.chat=template or take another model"
            )
        self._tokenizer = tokenizer
        self._parser = parser
        self._start, self._end = vocabulary[IM_START], vocabulary[IM_END]
        self.stop_ids: tuple[int, ...] = (self._end, *(i for i in engine_stops(tokenizer, stops) if i != self._end))
        self.fingerprint = hashlib.sha256(f"hermes-1\0{identity}".encode()).hexdigest()

    # Our format writes no date: its messages say what day it is.
    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> list[int]:  # noqa: ARG002
        """Tools stand at the end of the first system turn, one line each."""
        ids: list[int] = []
        rest = list(messages)
        if tools:
            first = rest.pop(0) if rest and rest[0].role == "system" else Message(role="system", content="")
            ids += self._turn("system", f"{first.content}\n\n{tools_note(tools)}".strip())
        for message in rest:
            ids += self._turn(message.role, message.content)
        return ids + self._begin()

    def extend(self, messages: Sequence[Message], after: int | None, today: dt.date) -> list[int]:  # noqa: ARG002
        """Closes a cut turn, then appends whole turns."""
        ids = [] if after == self._end else [self._end]
        ids += self._text("\n")
        for message in messages:
            ids += self._turn(message.role, message.content)
        return ids + self._begin()

    def assistant(self, message: Message, today: dt.date) -> list[int]:  # noqa: ARG002
        """Text, then calls, then the end of the turn."""
        return [*self._text(spoken(message)), self._end]

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Decodes without the stop id and parses."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        kept = list(ids[:-1]) if ended else list(ids)
        text = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._parser.parse(str(text), ended=ended)

    def tokens(self, text: str) -> int:
        """Length of a text by itself."""
        return len(self._text(text))

    def _begin(self) -> list[int]:
        return [self._start, *self._text("assistant\n")]

    def _turn(self, role: str, content: str) -> list[int]:
        return [self._start, *self._text(f"{role}\n{content}"), self._end, *self._text("\n")]

    def _text(self, text: str) -> list[int]:
        # Control tokens inside the text are encoded as the characters they are written with.
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def load_chat(
    path: Path, kind: Literal["auto", "template", "hermes"], tool_parser: str, reasoning_parser: str, identity: str
) -> ChatFormat:
    """The format of the tokenizer in `path`. `identity` is the fingerprint of that folder.

    `auto` takes the template where it can say all that a step may have to say, and ours otherwise; parsers that are `auto`
    are those of the template's family, or those of our format. Raises SettingsError that says what the tokenizer or its
    template lacks.
    """
    tokenizer, template = _tokenizer(path)
    stops = generation_stops(path)
    if kind != "hermes":
        try:
            parser = TurnParser(tokenizer, *chosen_parsers(template, tool_parser, reasoning_parser))
            return TemplateFormat(tokenizer, parser, identity, stops=stops)
        except ToolsNotRendered as error:
            if kind == "template":
                raise
            logger.info("%s takes our own chat format: %s", path, error)
        except SettingsError as error:
            if kind == "template":
                raise SettingsError(f"{error}; or run with model.transcript=rendered") from error
            logger.warning("%s takes our own chat format: %s", path, error)
    parser = TurnParser(tokenizer, *_our_parsers(template, tool_parser, reasoning_parser))
    if IM_START in tokenizer.get_vocab() or not template:
        return HermesFormat(tokenizer, parser, identity, stops)
    # Without ChatML's tokens our format stands inside the turns that the model knows.
    return TemplateFormat(tokenizer, parser, identity, told_in_words=True, stops=stops)


def load_rendered(path: Path, tool_parser: str, reasoning_parser: str, identity: str) -> RenderedFormat:
    """The tokenizer's chat template, to be rendered anew each turn. Raises SettingsError as `load_chat`."""
    tokenizer, template = _tokenizer(path)
    stops = generation_stops(path)
    try:
        parser = TurnParser(tokenizer, *chosen_parsers(template, tool_parser, reasoning_parser))
        return RenderedFormat(tokenizer, parser, identity, stops=stops)
    except ToolsNotRendered as error:
        logger.info("%s is told of tools in words: %s", path, error)
    parser = TurnParser(tokenizer, *_our_parsers(template, tool_parser, reasoning_parser))
    return RenderedFormat(tokenizer, parser, identity, told_in_words=True, stops=stops)


def _tokenizer(path: Path) -> tuple[Any, str]:
    """(tokenizer, its chat template or nothing)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return tokenizer, tokenizer.chat_template or ""


def _our_parsers(template: str, tool_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """The parsers of our own way to call tools; whether a model reasons is its template's to say."""
    return chosen_parsers(template, "hermes" if tool_parser == "auto" else tool_parser, reasoning_parser)
