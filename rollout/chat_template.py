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
from rollout.tools_in_words import in_words
from rollout.trajectory import Message, ToolCall, call_id

_ANY_DAY = dt.date(2001, 2, 3)
_SYSTEM, _USER = Message(role="system", content="qz5system"), Message(role="user", content="qz4demand")
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

    def __init__(self, tokenizer: Any, told_in_words: bool = False) -> None:
        """With `told_in_words` tools, calls and results are words of the conversation, for templates that know no tools.

        Raises SettingsError unless the template shows the user's message and the tools.
        """
        if not tokenizer.chat_template:
            raise SettingsError("the tokenizer has no chat template; set model.chat=hermes")
        self._tokenizer = tokenizer
        self._in_words = told_in_words
        self._system = True
        self._arguments_as_text = False
        self._control = sorted((t for t in tokenizer.get_added_vocab() if t.strip()), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, self._control)) or r"(?!)")
        """Matches a control token."""
        if told_in_words:
            self._system = self._takes([_SYSTEM, _USER])
        opening = self.render([_SYSTEM, _USER], tuple(TOOLS.values()), _ANY_DAY)
        if _USER.content not in opening:
            raise SettingsError("the chat template drops the user's message; set model.chat=hermes")
        if missing := [
            t.name for t in TOOLS.values() if (t.summary if told_in_words else t.description) not in opening
        ]:
            raise ToolsNotRendered(f"the chat template does not render tools (no {missing[0]}); set model.chat=hermes")
        # Some templates want a call's arguments as JSON text and not as an object.
        call = ToolCall(id=call_id(0, 0), name="search", arguments='{"query": "q"}')
        self._arguments_as_text = not self._takes([_USER, Message(role="assistant", content="", tool_calls=(call,))])
        self.thinking = _THOUGHT.search(opening) is not None
        """Whether it begins an assistant's turn inside a thought."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], today: dt.date, generate: bool = True
    ) -> str:
        """A whole conversation; with `generate` up to where the assistant begins. Raises SettingsError if it is refused."""
        said = [self._harmless(m) for m in messages]
        if self._in_words:
            said, tools = in_words(said, tools, self._system), ()
        now = dt.datetime.combine(today, dt.time())
        try:
            text = self._tokenizer.apply_chat_template(
                [self._plain(m) for m in said],
                tools=[t.as_function() for t in tools] or None,
                add_generation_prompt=generate,
                tokenize=False,
                # The names under which templates ask for the date; they win over what transformers would answer.
                strftime_now=now.strftime,
                date_string=now.strftime("%d %b %Y"),
                current_date=today.isoformat(),
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            roles = ", ".join(m.role for m in said)
            raise SettingsError(f"the chat template refuses {roles}: {type(error).__name__}: {error}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _takes(self, messages: Sequence[Message]) -> bool:
        """Whether it renders them at all, the instructions included."""
        try:
            text = self.render(messages, (), _ANY_DAY, generate=False)
        except SettingsError:
            return False
        return messages[0].content in text

    def _harmless(self, message: Message) -> Message:
        """The message with no control token inside."""
        calls = tuple(
            ToolCall(
                id=self._inert(call.id),
                name=self._inert(call.name),
                # Read first: an escape in JSON could spell a control token.
                arguments=self._inert(json.dumps(json.loads(call.arguments), ensure_ascii=False)),
            )
            for call in message.tool_calls
        )
        texts = {name: self._inert(getattr(message, name)) for name in ("content", "reasoning", "call_id", "name")}
        return message.model_copy(update={**texts, "tool_calls": calls})

    def _plain(self, message: Message) -> dict[str, Any]:
        """A message as templates take it."""
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            plain["reasoning_content"] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.role == "tool":
            plain |= {"tool_call_id": message.call_id, "name": message.name}
        return plain

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments if self._arguments_as_text else json.loads(call.arguments)
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _inert(self, text: str) -> str:
        """The text with a zero-width space inside every control token that it spells."""
        for token in self._control:
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text
