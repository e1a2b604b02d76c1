"""Our own way to tell a model of tools: described in the instructions, called as `<tool_call>{"name": …, "arguments": …}</tool_call>`.

It needs nothing of a chat template but turns of a user and an assistant, so that a model whose template knows no tools can
use them.
"""

import json
from collections.abc import Sequence

from rollout.tools import ToolSchema
from rollout.trajectory import Message, ToolCall

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESULT_START, RESULT_END = "<tool_response>", "</tool_response>"


def tools_note(tools: Sequence[ToolSchema]) -> str:
    """What stands at the end of the instructions: one line for each tool, and how to call one."""
    lines = "\n".join(tool.summary for tool in tools)
    return f'Tools:\n{lines}\nCall one with {CALL_START}{{"name": ..., "arguments": {{...}}}}{CALL_END}'


def spoken(message: Message) -> str:
    """What an assistant says: its text, then its calls."""
    calls = [_written(call) for call in message.tool_calls]
    return "\n".join(part for part in (message.content, *calls) if part)


def in_words(messages: Sequence[Message], tools: Sequence[ToolSchema], system: bool) -> list[Message]:
    """The conversation as turns of a user and an assistant, after a system turn if there may be one (`system`)."""
    rest = list(messages)
    instructions = rest.pop(0).content if rest and rest[0].role == "system" else ""
    if tools:
        instructions = f"{instructions}\n\n{tools_note(tools)}".strip()
    told: list[Message] = []
    if instructions and system:
        told.append(Message(role="system", content=instructions))
    elif instructions:
        told.append(Message(role="user", content=instructions))
    for message in rest:
        if message.role == "assistant":
            told.append(message.model_copy(update={"content": spoken(message), "tool_calls": ()}))
            continue
        is_result = message.role == "tool"
        content = f"{RESULT_START}\n{message.content}\n{RESULT_END}" if is_result else message.content
        # Many templates want the two to take turns.
        if told and told[-1].role == "user":
            told[-1] = told[-1].model_copy(update={"content": f"{told[-1].content}\n\n{content}"})
        else:
            told.append(Message(role="user", content=content))
    return told


def _written(call: ToolCall) -> str:
    return f'{CALL_START}{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}{CALL_END}'
