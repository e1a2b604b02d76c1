"""Text of a sampled turn → reasoning, tool calls and visible text, by vLLM's own parsers.

Whatever a model wrote, parsing never raises, and everything that leaves can be stored as UTF-8.
"""

import logging
from typing import Annotated, Any

from pydantic import AfterValidator

from cluster.failures import SettingsError
from cluster.record import Record
from rollout.report import plain_text
from rollout.trajectory import ToolCall

_Text = Annotated[str, AfterValidator(plain_text)]
"""A model can spell half a character as a JSON escape; no file and no tokenizer takes it."""


class ParsedTurn(Record):
    """What a sampled turn says."""

    text: _Text
    """Visible text without reasoning and call markup."""
    reasoning: _Text = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[_Text, ...] = ()
    """One reason for each call that could not be parsed."""


def storable(call: ToolCall) -> ToolCall:
    """The call with lone surrogates replaced."""
    return ToolCall(id=plain_text(call.id), name=plain_text(call.name), arguments=plain_text(call.arguments))


class TurnParser:
    """A tool-call parser and, for models that reason, a reasoning parser."""

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str) -> None:
        """Both by their registered names. Raises SettingsError for a name that vLLM does not know."""
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
        try:
            if self._reasoning_parser is not None:
                thought, said = self._reasoning_parser(self._tokenizer).extract_reasoning(text, self._request)
                reasoning, text = thought or "", said or ""
            parser = self._tool_parser(self._tokenizer)
            found = parser.extract_tool_calls(text, self._request)
        except Exception as error:  # noqa: BLE001 - foreign parsers raise anything on malformed text, which is data here
            return ParsedTurn(text=text, reasoning=reasoning, malformed=(f"{type(error).__name__}: {error}",))
        if found.tools_called:
            calls = tuple(
                storable(ToolCall(id=f"{i}", name=c.function.name, arguments=c.function.arguments))
                for i, c in enumerate(found.tool_calls)
            )
            return ParsedTurn(text=(found.content or "").strip(), reasoning=reasoning, tool_calls=calls)
        start = getattr(parser, "tool_call_start_token", None)
        malformed = ("the call is not valid JSON with a name and arguments",) if start and start in text else ()
        return ParsedTurn(text=text.strip(), reasoning=reasoning, malformed=malformed)
