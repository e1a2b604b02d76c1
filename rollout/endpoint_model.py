"""An OpenAI-compatible server as a Model: messages in, text and native tool calls out."""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from cluster.endpoint.body import ChatCall, FunctionTool
from cluster.endpoint.client import EndpointClient, Reply
from cluster.endpoint.fault import FaultKind
from rollout.model import Completion, SampleRequest
from rollout.record import ForecastKey
from rollout.tools import TOOLS
from rollout.trajectory import FinishReason, Message, ToolCall

logger = logging.getLogger(__name__)

SHORTEST_ANSWER = 256
"""Tokens that a report needs; a context without room for them is full."""
PROOF_TOKENS = 64
"""Of a proving call's answer; some servers refuse fewer than 16."""

_CLOSED: dict[FaultKind, FinishReason] = {
    "refused": "refused",
    "context-full": "context-full",
    "bad-request": "bad-request",
}


def endpoint_weights(base_url: str, model: str) -> str:
    """What stands for the fingerprint of weights that nobody can see: the model and where it is served."""
    return f"{model}@{base_url}"


def proving_calls(keys: Sequence[ForecastKey], max_tokens: int) -> tuple[ChatCall, ...]:
    """Plain calls with which a run shows that its endpoint takes what steps will send: with tools offered, and withdrawn."""
    message = {"role": "user", "content": "Answer with the single word ready."}
    date = min(key.date for key in keys)
    plain = ChatCall(messages=(message,), max_tokens=min(max_tokens, PROOF_TOKENS), date=date)
    if all(key.mode == "no-tools" for key in keys):
        return (plain,)
    tools = function_tools()
    return tuple(plain.model_copy(update={"tools": tools, "offered": offered}) for offered in (True, False))


class EndpointModel:
    """Samples from an endpoint."""

    def __init__(self, client: EndpointClient, weights: str, reasoning_field: str = "") -> None:
        """`weights` is `endpoint_weights`; what the server says of itself is added to it in every completion."""
        self._client, self._weights, self._reasoning_field = client, weights, reasoning_field

    async def sample(self, request: SampleRequest) -> Completion:
        """Raises InfrastructureError when the attempt must be repeated elsewhere, or cannot be."""
        call = ChatCall(
            messages=tuple(wire_messages(request.messages, self._reasoning_field)),
            tools=() if request.mode == "no-tools" else function_tools(),
            offered=bool(request.tools),
            max_tokens=request.max_tokens,
            date=request.date,
        )
        reply = await self._client.complete(call)
        while reply.fault is not None and reply.fault.kind == "context-full" and call.max_tokens > SHORTEST_ANSWER:
            # Servers refuse a prompt that fits if the longest answer would not: ask for a shorter one, as engines are asked.
            call = call.model_copy(update={"max_tokens": max(SHORTEST_ANSWER, call.max_tokens // 2)})
            reply = await self._client.complete(call)
        return self._completion(reply, request)

    async def release(self, session: str) -> None:
        """An endpoint pins nothing."""

    def _completion(self, reply: Reply, request: SampleRequest) -> Completion:
        if reply.fault is not None:
            closed, why = _CLOSED[reply.fault.kind], reply.fault.detail
            return Completion(finish=closed, detail=why, seconds=reply.seconds, weights=self._weights)
        answer = reply.answer
        assert answer is not None
        finish: FinishReason = answer.finish
        detail = "the server's content filter, or the model itself, declined" if finish == "refused" else ""
        if answer.browsed:
            finish, detail = "browsed", f"the provider browsed by itself: {answer.browsed}"
            logger.error("BOUNDARY: %s, %s: %s", request.session, request.date, detail)
        said = [("served", answer.model), ("system_fingerprint", answer.system_fingerprint)]
        return Completion(
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=tuple(
                ToolCall(id=c.id or str(i), name=c.name, arguments=c.arguments) for i, c in enumerate(answer.calls)
            ),
            finish=finish,
            detail=detail,
            input_tokens=reply.count.input,
            output_tokens=reply.count.output,
            cached_tokens=reply.count.cached,
            seconds=reply.seconds,
            price=reply.price,
            weights=" ".join([self._weights, *(f"{name}={value}" for name, value in said if value)]),
        )


def function_tools() -> tuple[FunctionTool, ...]:
    """Our tools as the protocol's functions."""
    return tuple(FunctionTool(name=t.name, description=t.description, parameters=t.parameters) for t in TOOLS.values())


def wire_messages(messages: Sequence[Message], reasoning_field: str = "") -> Iterable[dict[str, Any]]:
    """The conversation in the protocol's shapes, reasoning left out unless a field for it is named."""
    called: set[str] = set()
    for message in messages:
        wire: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "tool" and message.call_id in called:
            wire["tool_call_id"] = message.call_id
        elif message.role == "tool":
            # The protocol has no place for a result without a call.
            wire["role"] = "user"
        if reasoning_field and message.reasoning:
            wire[reasoning_field] = message.reasoning
        if message.tool_calls:
            called |= {call.id for call in message.tool_calls}
            # Some servers refuse an empty text beside calls.
            wire["content"] = message.content or None
            wire["tool_calls"] = [wire_call(call) for call in message.tool_calls]
        yield wire


def wire_call(call: ToolCall) -> dict[str, Any]:
    """A call as the model is shown that it made it."""
    function = {"name": wire_name(call.name), "arguments": wire_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def wire_name(name: str) -> str:
    """A function's name as servers take it, if the model called one that they would not."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "unnamed"


def wire_arguments(arguments: str) -> str:
    """Arguments as a JSON object, without which servers refuse the whole conversation; what cannot be read is quoted in one."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return arguments if isinstance(found, dict) else json.dumps({"unreadable": arguments})
