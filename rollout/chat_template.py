"""A tokenizer's own chat template, as the chat formats use it: our messages in, text or ids out.

Texts of others (articles, programs, what a model called) never become control tokens, and the only day that a template is
told is the forecast date.
"""

import datetime as dt
import json
import re
from collections.abc import Sequence
from typing import Any

import jinja2

from cluster.failures import SettingsError
from rollout.tools import TOOLS, ToolSchema
from rollout.trajectory import Message, ToolCall, call_id

_ANY_DAY = dt.date(2001, 2, 3)
_SYSTEM, _USER = Message(role="system", content="s"), Message(role="user", content="qz4demand")
_THOUGHT = re.compile(r"(?:<think>|\[THINK\])\s*\Z")


class ToolsNotRendered(SettingsError):
    """The template has no place for tools at all."""


def joined(messages: Sequence[Message]) -> list[Message]:
    """The messages with a user's words put below the tool result before them: some templates let no user follow a tool."""
    found: list[Message] = []
    for message in messages:
        if message.role == "user" and found and found[-1].role == "tool":
            found[-1] = found[-1].model_copy(update={"content": f"{found[-1].content}\n\n{message.content}"})
        else:
            found.append(message)
    return found


class ChatTemplate:
    """Renders conversations."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises SettingsError unless the template shows the user's message and the tools."""
        if not tokenizer.chat_template:
            raise SettingsError("the tokenizer has no chat template; set model.chat=hermes")
        self._tokenizer = tokenizer
        self._control = sorted((t for t in tokenizer.get_added_vocab() if t.strip()), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, self._control)) or r"(?!)")
        """Matches a control token."""
        opening = self.render([_SYSTEM, _USER], tuple(TOOLS.values()), _ANY_DAY)
        if _USER.content not in opening:
            raise SettingsError("the chat template drops the user's message; set model.chat=hermes")
        if missing := [name for name, tool in TOOLS.items() if tool.description not in opening]:
            raise ToolsNotRendered(f"the chat template does not render tools (no {missing[0]}); set model.chat=hermes")
        self._arguments_as_text = not self._takes_objects()
        self.thinking = _THOUGHT.search(opening) is not None
        """Whether it begins an assistant's turn inside a thought."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date, generate: bool = True
    ) -> str:
        """A whole conversation; with `generate` up to where the assistant begins. Raises SettingsError if it is refused."""
        return self.render_plain([self.plain(m) for m in messages], tools, today, generate)

    def render_plain(
        self, messages: list[dict[str, Any]], tools: Sequence[ToolSchema], today: dt.date, generate: bool
    ) -> str:
        """As `render`, for messages as templates take them."""
        now = dt.datetime.combine(today, dt.time())
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=[t.as_function() for t in tools] or None,
                add_generation_prompt=generate,
                tokenize=False,
                # The names under which templates ask for the date; they win over what transformers would answer.
                strftime_now=now.strftime,
                date_string=now.strftime("%d %b %Y"),
                current_date=today.isoformat(),
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            roles = ", ".join(m["role"] for m in messages)
            raise SettingsError(f"the chat template refuses {roles}: {type(error).__name__}: {error}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def plain(self, message: Message) -> dict[str, Any]:
        """A message as templates take it, with no control token inside."""
        plain: dict[str, Any] = {"role": message.role, "content": self._inert(message.content)}
        if message.reasoning:
            plain["reasoning_content"] = self._inert(message.reasoning)
        if message.tool_calls:
            plain["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.role == "tool":
            plain |= {"tool_call_id": self._inert(message.call_id), "name": self._inert(message.name)}
        return plain

    def _takes_objects(self) -> bool:
        """Whether a call's arguments are given as an object; some templates want them as JSON text."""
        self._arguments_as_text = False
        call = ToolCall(id=call_id(0, 0), name="search", arguments='{"query": "q"}')
        try:
            self.render(
                [_USER, Message(role="assistant", content="", tool_calls=(call,))], (), _ANY_DAY, generate=False
            )
        except SettingsError:
            return False
        return True

    def _call(self, call: ToolCall) -> dict[str, Any]:
        # Read first: an escape in JSON could spell a control token.
        arguments = self._inert(json.dumps(json.loads(call.arguments), ensure_ascii=False))
        written = arguments if self._arguments_as_text else json.loads(arguments)
        function = {"name": self._inert(call.name), "arguments": written}
        return {"id": self._inert(call.id), "type": "function", "function": function}

    def _inert(self, text: str) -> str:
        """The text with a zero-width space inside every control token that it spells."""
        for token in self._control:
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text
