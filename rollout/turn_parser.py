"""Text of a sampled turn → reasoning, tool calls and visible text, by vLLM's own parsers.

Whatever a model wrote, parsing never raises, and everything that leaves can be stored as UTF-8.
"""

import logging
import re
from typing import Annotated, Any

from pydantic import AfterValidator

from cluster.failures import SettingsError
from cluster.record import Record
from rollout.harmony import read_turn
from rollout.report import plain_text
from rollout.tools import TOOLS
from rollout.trajectory import MalformedCall, ToolCall, call_id

HARMONY = "openai"
"""vLLM's name for the calls of gpt-oss, which are read here."""
_BARE = ("llama3_json", "llama4_json")
"""Parsers of calls that are JSON without any mark around it."""
_BARE_CALL = re.compile(r'\{\s*"name"\s*:\s*"')

_Text = Annotated[str, AfterValidator(plain_text)]
"""A model can spell half a character as a JSON escape; no file and no tokenizer takes it."""
_NOT_JSON = "the call is not valid JSON with a name and arguments"
_CUT_OFF = "the turn was cut inside the call; write shorter calls"


class ParsedTurn(Record):
    """What a sampled turn says."""

    text: _Text
    """Visible text without reasoning and call markup."""
    reasoning: _Text = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    """One for each call that could not be read."""

    def numbered(self, turn: int) -> "ParsedTurn":
        """With call ids that no other turn of the step has."""
        calls = tuple(c.model_copy(update={"id": call_id(turn, i)}) for i, c in enumerate(self.tool_calls))
        return self.model_copy(update={"tool_calls": calls})


def storable(call: ToolCall) -> ToolCall:
    """The call with lone surrogates replaced."""
    return ToolCall(id=plain_text(call.id), name=plain_text(call.name), arguments=plain_text(call.arguments))


class TurnParser:
    """A tool-call parser and, for models that reason, a reasoning parser."""

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str) -> None:
        """Both by their registered names. Raises SettingsError for a name that vLLM does not know."""
        # Imported here: vLLM takes seconds to import and only processes that parse need it.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        # The parsers log a traceback for every malformed call; here a malformed call is data.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        logging.getLogger("vllm.parser").setLevel(logging.CRITICAL)
        self.name = tool_parser
        self._tokenizer = tokenizer
        # Formats that write arguments without JSON types are read by the tools' schemas.
        self._tools = [ChatCompletionToolsParam.model_validate(tool.as_function()) for tool in TOOLS.values()]
        self._request = ChatCompletionRequest(messages=[], model="", tools=self._tools)
        self._harmony = tool_parser == HARMONY
        if self._harmony:
            return
        try:
            self._tool_parser = ToolParserManager.get_tool_parser(tool_parser)
            self._reasoning_parser = (
                ReasoningParserManager.get_reasoning_parser(reasoning_parser) if reasoning_parser else None
            )
        except KeyError as error:
            raise SettingsError(f"model.tool_parser or model.reasoning_parser is not one of vLLM's: {error}") from error
        try:
            parser = self._tool_parser(tokenizer, self._tools)
            if self._reasoning_parser is not None:
                self._reasoning_parser(tokenizer)
        except (RuntimeError, ValueError) as error:
            raise SettingsError(
                f"model.tool_parser={tool_parser} or model.reasoning_parser={reasoning_parser} does not work with this "
                f"tokenizer: {error}"
            ) from error
        names = ("tool_call_start_token", "tool_calls_start_token", "bot_token")
        found = [mark for name in names if (mark := getattr(parser, name, None))]
        self._call_mark = str(found[0]) if found else ""
        """How a call begins, where the parser says it."""
        self._bare = tool_parser in _BARE

    def parse(self, text: str, thinking: bool = False, ended: bool = True) -> ParsedTurn:
        """Never raises: a parser's own exception is a malformed call.

        `thinking`: the turn was begun inside a thought. `ended`: the model ended the turn itself.
        """
        if self._harmony:
            turn = read_turn(text)
            calls = tuple(storable(ToolCall(id=f"{i}", name=n, arguments=a)) for i, (n, a) in enumerate(turn.calls))
            return ParsedTurn(text=turn.text, reasoning=turn.reasoning, tool_calls=calls)
        reasoning = ""
        try:
            reasoning, text = self._divided(text, thinking)
            found = self._tool_parser(self._tokenizer, self._tools).extract_tool_calls(text, self._request)
        except Exception as error:  # noqa: BLE001 - foreign parsers raise anything on malformed text, which is data here
            reason = plain_text(f"{type(error).__name__}: {error}")
            return ParsedTurn(
                text=text, reasoning=reasoning, malformed=(MalformedCall(kind="parser-error", reason=reason),)
            )
        if found.tools_called:
            calls = tuple(
                storable(ToolCall(id=f"{i}", name=c.function.name, arguments=c.function.arguments))
                for i, c in enumerate(found.tool_calls)
            )
            return ParsedTurn(text=(found.content or "").strip(), reasoning=reasoning, tool_calls=calls)
        malformed: tuple[MalformedCall, ...] = ()
        if self._calls(text):
            one = MalformedCall(kind="bad-json", reason=_NOT_JSON)
            malformed = (one if ended else MalformedCall(kind="cut-off", reason=_CUT_OFF),)
        return ParsedTurn(text=text.strip(), reasoning=reasoning, malformed=malformed)

    def _calls(self, text: str) -> bool:
        """Whether a call was begun."""
        marked = bool(self._call_mark) and self._call_mark in text
        return marked or (self._bare and _BARE_CALL.search(text) is not None)

    def _divided(self, text: str, thinking: bool) -> tuple[str, str]:
        """(reasoning, the rest)."""
        if self._reasoning_parser is None:
            return "", text
        thought, said = self._reasoning_parser(self._tokenizer).extract_reasoning(text, self._request)
        # The parsers take a turn without any mark for an unfinished thought; if it was not begun as one, it is said.
        if not thinking and not said and (thought or "").strip() == text.strip():
            return "", text
        return thought or "", said or ""
