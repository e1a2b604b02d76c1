"""What went wrong with one request, as one of few kinds: the retry classes of OracleProto's Table 21, and ours.

Servers agree on little but the status: a code or a sentence in the body tells a refused text from a wrong parameter.
The order of the checks is a promise: a refusal or a full context is never taken for a malformed request.
"""

import datetime as dt
import email.utils
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from cluster.record import Record

FaultKind = Literal[
    "network",
    "malformed",
    "server",
    "rate-limit",
    "quota",
    "auth",
    "unknown-model",
    "refused",
    "context-full",
    "bad-request",
]
"""`network`: no connection, a cut one, or silence past a deadline. `malformed`: an answer that is not the protocol's.
`quota`: the account's money or allowance is spent. `refused`: the provider's content policy. `context-full`: prompt and
answer exceed the model's context."""

_REFUSED = (
    "content_policy",
    "content_filter",
    "content-filter",
    "content policy",
    "content management policy",
    "safety",
    "data_inspection_failed",
    "inappropriate content",
    "sensitive",
    "moderation",
)
"""Table 21's needles and their spellings elsewhere."""
_CONTEXT = (
    "context_length_exceeded",
    "context length",
    "context window",
    "maximum context",
    "max_model_len",
    "prompt is too long",
    "input is too long",
    "too many tokens",
    "exceeds the maximum number of tokens",
    "exceed_context_size",
)
_QUOTA = (
    "insufficient_quota",
    "exceeded your current quota",
    "insufficient balance",
    "insufficient credits",
    "billing",
)
_MODEL = ("model_not_found", "model not found", "does not exist", "unknown model", "no such model", "not a valid model")

_STATUSES = frozenset(str(status) for status in range(400, 600))


def _storable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


StorableText = Annotated[str, AfterValidator(_storable)]
"""What a server wrote: JSON can spell half a character, or a whole one as two halves in two chunks; no file takes a half."""


class Fault(Record):
    """Why one request gave no answer."""

    kind: FaultKind
    detail: StorableText
    """For a person: the status and what the server said."""
    retry_after_s: float | None = None
    """How long the server asks to be left alone."""


def of_status(status: int, said: str, retry_after_s: float | None = None) -> Fault:
    """The fault that a status tells, with `said`, the body's code, type and message, deciding where statuses are vague."""
    return Fault(
        kind=_kind(status, said.casefold()), detail=f"HTTP {status}: {said}"[:2000], retry_after_s=retry_after_s
    )


def _kind(status: int, said: str) -> FaultKind:
    def says(needles: tuple[str, ...]) -> bool:
        return any(needle in said for needle in needles)

    if status == 402 or (status in (400, 403, 429) and says(_QUOTA)):
        return "quota"
    if status == 429:
        return "rate-limit"
    if status == 413:
        return "context-full"
    if status in (400, 403, 422):
        # A moderated text may come as 403; anything else with 403 is about the key.
        if says(_CONTEXT):
            return "context-full"
        if says(_REFUSED):
            return "refused"
    if status in (401, 403):
        return "auth"
    if status in (404, 410) or (status == 400 and says(_MODEL)):
        return "unknown-model"
    if status in (408, 409, 425):
        return "network"
    return "server" if status >= 500 else "bad-request"


def of_body(error: Any) -> Fault:
    """The fault of an error object inside an answer whose status was 200: some servers fail in mid-stream."""
    found = error if isinstance(error, Mapping) else {"message": str(error)}
    code = str(found.get("code"))
    status = int(code) if code in _STATUSES else 0
    said = words_of(found)
    if status:
        return of_status(status, said)
    kind = _kind(400, said.casefold())
    if "rate_limit" in said.casefold() or "rate limit" in said.casefold():
        kind = "rate-limit"
    # An error without a status that names no cause is the server's own.
    return Fault(kind="server" if kind == "bad-request" else kind, detail=f"in the answer: {said}"[:2000])


def words_of(error: Mapping[str, Any]) -> str:
    """Code, type and message of an error object in one line."""
    parts = [str(error[name]) for name in ("code", "type", "message") if error.get(name)]
    metadata = error.get("metadata")
    if isinstance(metadata, Mapping):
        parts += [f"{name}={value}" for name, value in metadata.items()]
    return " ".join(parts) or str(dict(error))


def retry_after_seconds(headers: Mapping[str, str], now: dt.datetime) -> float | None:
    """What `Retry-After` (seconds or an HTTP date, RFC 9110 §10.2.3) or `retry-after-ms` asks for; None if neither does.

    A date is measured against the answer's own `Date`, so that a wrong clock here does not matter; without it, against `now`.
    """
    milliseconds = headers.get("retry-after-ms", "")
    if _number(milliseconds) is not None:
        return max(0.0, float(milliseconds) / 1000)
    asked = headers.get("retry-after", "").strip()
    seconds = _number(asked)
    if seconds is not None:
        return max(0.0, seconds)
    until = _date(asked)
    if until is None:
        return None
    return max(0.0, (until - (_date(headers.get("date", "")) or now)).total_seconds())


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def _date(text: str) -> dt.datetime | None:
    try:
        found = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)
