"""A real rollout whose tool calls are decided by the benchmark: every turn with tools calls one, whatever was sampled.

Prompts, sampling, transcript, budgets, routing, leases and ledger are those of any run; only what a small untrained model
would not do, calling a tool, is done for it, and the tool is a pause and a text of a fixed length.
"""

import asyncio
import datetime as dt
from collections.abc import Sequence

from cluster.config import Settings
from cluster.pool import EngineClient
from rollout.chat import ChatFormat, HermesFormat
from rollout.lease import Lease
from rollout.template import TemplateFormat
from rollout.tools import ToolRunner, ToolSchema, ToolWant
from rollout.trajectory import Message, ToolCall, ToolResult
from rollout.turn_parser import ParsedTurn
from rollout.worker import Questions, RolloutWorker

TOOL_TEXT = "The pollster asked 812 voters in the north and found that 41.5 per cent would choose the first list. " * 4
"""About 100 tokens: a short search result."""


class AlwaysCalls:
    """A chat format in whose turns a search is always found."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.fingerprint, self.stop_ids = chat.fingerprint, chat.stop_ids

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date) -> list[int]:
        """As the format does."""
        return self._chat.open(messages, tools, today)

    def extend(self, messages: Sequence[Message], after: int | None, today: dt.date) -> list[int]:
        """As the format does."""
        return self._chat.extend(messages, after, today)

    def assistant(self, message: Message, today: dt.date) -> list[int]:
        """As the format does."""
        return self._chat.assistant(message, today)

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """What was said, and a search."""
        said = self._chat.parse(ids)
        call = ToolCall(id="0", name="search", arguments='{"query": "polls"}')
        return said.model_copy(update={"tool_calls": (call,), "malformed": ()})

    def tokens(self, text: str) -> int:
        """As the format does."""
        return self._chat.tokens(text)


class Pause(ToolRunner):
    """A tool that takes its time and does nothing else."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def run(self, want: ToolWant) -> ToolResult:
        """The same text for every want."""
        await asyncio.sleep(self._seconds)
        return ToolResult(call_id=want.call_id, name="search", text=TOOL_TEXT, seconds=self._seconds)


class ScriptedWorker(RolloutWorker):
    """Made a Ray actor by a benchmark, in place of a RolloutWorker."""

    def __init__(self, settings: Settings, engines: EngineClient, questions: Questions, tool_seconds: float) -> None:
        super().__init__(settings, engines, None, questions)
        self._tool_seconds = tool_seconds

    def _prepare(self) -> None:
        super()._prepare()
        if isinstance(self._chat, HermesFormat | TemplateFormat):
            self._chat = AlwaysCalls(self._chat)

    def _tools(self, lease: Lease) -> ToolRunner | None:  # noqa: ARG002 - the worker's signature
        return Pause(self._tool_seconds)
