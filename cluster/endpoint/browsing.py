"""Provider-side browsing: a request that could cause it is refused, an answer that shows it is a breach.

What a provider looks up for a model was published at any time, today included: it bypasses the dated view. So a run
sends its own tools and none of the provider's, and looks at every answer for signs that the provider searched anyway.
"""

from collections.abc import Collection, Mapping
from typing import Any

_BROWSING_SUFFIXES = (":online",)
_BROWSING_SLUGS = ("search-preview", "search-api", "deep-research", "sonar")
"""Parts of slugs of models that always search: no request can turn it off."""

_BROWSING_FIELDS = frozenset(
    {
        "plugins",
        "web_search_options",
        "web_search",
        "enable_search",
        "search_options",
        "search_parameters",
        "search_domain_filter",
        "search_recency_filter",
        "grounding",
        "google_search",
        "data_sources",
        "documents",
        "mcp_servers",
    }
)
"""Body fields by which providers turn on a search or bring in documents of their own."""

_MESSAGE_SIGNS = ("annotations", "citations", "search_results", "executed_tools", "web_search", "grounding_metadata")
_USAGE_SIGNS = ("server_tool_use", "web_search_requests", "num_search_queries", "num_sources_used")


def slug_fault(slug: str) -> str:
    """Why a model's slug is refused; empty if it is not."""
    name = slug.casefold()
    if name.endswith(_BROWSING_SUFFIXES):
        return f"{slug!r} turns on the provider's web search, which knows no cutoff; take the slug without its suffix"
    if part := next((p for p in _BROWSING_SLUGS if p in name), ""):
        return (
            f"{slug!r} is a model that searches the web by itself ({part}), which knows no cutoff; take another model"
        )
    return ""


def field_faults(body: Mapping[str, Any], where: str) -> list[str]:
    """One line for each field, at any depth, by which a provider would browse."""
    faults = []
    for name, value in body.items():
        if name.casefold() in _BROWSING_FIELDS:
            faults.append(
                f"{where}.{name} turns on the provider's own search or documents, which know no cutoff; remove it"
            )
        elif isinstance(value, Mapping):
            faults += field_faults(value, f"{where}.{name}")
    return faults


def body_fault(body: Mapping[str, Any], own_tools: Collection[str]) -> str:
    """Why a final request body may not be sent; empty if it may. `own_tools` are the only tools it may offer."""
    if fault := slug_fault(str(body.get("model", ""))):
        return fault
    for slug in body.get("models") or ():
        if fault := slug_fault(str(slug)):
            return fault
    content = {name: value for name, value in body.items() if name not in ("messages", "tools")}
    if faults := field_faults(content, "body"):
        return faults[0]
    for tool in body.get("tools") or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function" or function.get("name") not in own_tools:
            return f"the body offers a tool that is not one of ours: {str(tool)[:200]}; only {sorted(own_tools)} may be offered"
    return ""


def browsing_shown(answer: Mapping[str, Any]) -> str:
    """What in an answer, or in one chunk of it, shows that the provider browsed; empty if nothing does."""
    parts: list[Any] = [answer]
    for choice in answer.get("choices") or ():
        if isinstance(choice, Mapping):
            parts += [choice, choice.get("message"), choice.get("delta")]
    for part in parts:
        if isinstance(part, Mapping) and (sign := next((s for s in _MESSAGE_SIGNS if part.get(s)), "")):
            return f"{sign}: {str(part[sign])[:500]}"
        calls = part.get("tool_calls") if isinstance(part, Mapping) else None
        for call in calls if isinstance(calls, list | tuple) else ():
            if isinstance(call, Mapping) and call.get("type") not in (None, "", "function"):
                return f"a call of the server's own: {str(call)[:500]}"
    usage = answer.get("usage")
    return _in_usage(usage) if isinstance(usage, Mapping) else ""


def _in_usage(usage: Mapping[str, Any]) -> str:
    for name, value in usage.items():
        if name in _USAGE_SIGNS and _counted(value):
            return f"usage.{name}: {value}"
        if isinstance(value, Mapping) and (found := _in_usage(value)):
            return found
    return ""


def _counted(value: Any) -> bool:
    """Whether a count, or any count within a mapping, is above zero."""
    if isinstance(value, Mapping):
        return any(_counted(v) for v in value.values())
    return isinstance(value, int | float) and value > 0
