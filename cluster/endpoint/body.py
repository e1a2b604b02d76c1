"""The final request body, field by field: what is sent is built here and nowhere else.

It holds the conversation, our own tools and the settings' parameters. Nothing in it says what day it is but the forecast
date, and nothing can make the provider browse: that is checked on the body itself, after everything was merged.
"""

import datetime as dt
from typing import Any

from cluster.config import EndpointSettings, SamplingSettings
from cluster.endpoint.browsing import body_fault
from cluster.failures import SettingsError
from cluster.record import Record


class FunctionTool(Record):
    """A tool of ours. There is no type for a provider's own."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""

    def wire(self) -> dict[str, Any]:
        """As the protocol writes it."""
        return {"type": "function", "function": self.model_dump()}


class ChatCall(Record):
    """One model call, in the protocol's own shapes."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[FunctionTool, ...] = ()
    """The functions of this conversation, offered or not."""
    offered: bool = False
    """Whether they may be called now."""
    max_tokens: int
    date: dt.date
    """The forecast date."""


def request_body(call: ChatCall, settings: EndpointSettings, sampling: SamplingSettings) -> dict[str, Any]:
    """The JSON to send. Raises SettingsError if the provider could browse with it."""
    body: dict[str, Any] = {
        **settings.extra_body,
        "model": settings.model,
        "messages": list(call.messages),
        settings.max_tokens_field: call.max_tokens,
    }
    if settings.send_sampling:
        body["temperature"] = sampling.temperature
        body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
    if call.tools and (call.offered or settings.tools == "choice-none"):
        body["tools"] = [tool.wire() for tool in call.tools]
        body["tool_choice"] = "auto" if call.offered else "none"
    if settings.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if settings.date_variable:
        variables = dict(body.get("chat_template_kwargs") or {})
        variables[settings.date_variable] = call.date.strftime("%d %b %Y")
        body["chat_template_kwargs"] = variables
    if fault := body_fault(body, {tool.name for tool in call.tools}):
        raise SettingsError(f"a request to {settings.base_url} was not sent: {fault}")
    return body


def estimated_tokens(call: ChatCall) -> int:
    """A rough count of prompt and longest answer, for the limit per minute: four characters a token, as English has."""
    characters = sum(len(str(m.get("content") or "")) + len(str(m.get("tool_calls") or "")) for m in call.messages)
    return (characters + sum(len(str(tool)) for tool in call.tools)) // 4 + call.max_tokens
