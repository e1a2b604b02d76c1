"""A chat format whose tokens are words: token-exact like the real ones, and free of tokenizers and templates.

Turns stand between control tokens, calls are `<tool_call>{json}</tool_call>`. Text can never spell a control token.
"""

import datetime as dt
import json
import re
from collections.abc import Sequence

from rollout.tools import ToolSchema
from rollout.trajectory import MalformedCall, Message, ToolCall
from rollout.turn_parser import ParsedTurn, storable

START, END = 0, 1
"""Control tokens: the beginning and the end of a turn."""

_PIECE = re.compile(r"\s+|\w+|[^\w\s]")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class WordFormat:
    """Ids are given to words in the order in which they are first met."""

    fingerprint = "simulated-words"
    stop_ids: tuple[int, ...] = (END,)

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = ["", ""]

    def encode(self, text: str) -> list[int]:
        """Ids of a text; `decode` gives it back."""
        ids = []
        for piece in _PIECE.findall(text):
            number = self._ids.get(piece)
            if number is None:
                number = self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(number)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without control tokens."""
        return "".join(self._pieces[i] for i in ids)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> list[int]:  # noqa: ARG002
        """Tools first, then the turns."""
        ids = [START, *self.encode("tools " + " ".join(t.name for t in tools)), END] if tools else []
        return ids + self._turns(messages)

    def extend(self, messages: Sequence[Message], after: int | None, today: dt.date) -> list[int]:  # noqa: ARG002
        """Closes a cut turn, then appends."""
        return ([] if after == END else [END]) + self._turns(messages)

    def assistant(self, message: Message, today: dt.date) -> list[int]:  # noqa: ARG002
        """What an assistant would have to sample."""
        calls = "".join(spoken_call(c.name, c.arguments) for c in message.tool_calls)
        return [*self.encode(message.content + calls), END]

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Never raises."""
        text = self.decode(ids)
        calls: list[ToolCall] = []
        malformed: list[MalformedCall] = []
        for number, body in enumerate(_CALL.findall(text)):
            try:
                said = json.loads(body)
                call = ToolCall(id=str(number), name=said["name"], arguments=json.dumps(said["arguments"]))
            except (ValueError, KeyError, TypeError) as error:
                malformed.append(MalformedCall(kind="bad-json", reason=type(error).__name__))
            else:
                calls.append(storable(call))
        return ParsedTurn(text=_CALL.sub("", text).strip(), tool_calls=tuple(calls), malformed=tuple(malformed))

    def tokens(self, text: str) -> int:
        """Length of a text by itself."""
        return len(_PIECE.findall(text))

    def _turns(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [START, *self.encode(f"{message.role}\n{message.content}"), END]
        return [*ids, START, *self.encode("assistant\n")]


def spoken_call(name: str, arguments: str) -> str:
    """A call as it is said; `arguments` is JSON, well-formed or not."""
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'
