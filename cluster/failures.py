"""One taxonomy of failures, decided in one place.

`infrastructure` is retried elsewhere, `model` is recorded and scored by the named policy, `data` is recorded and
counted against a budget, `bug` is loud. Exceptions of foreign libraries become one of ours inside the actor that saw
them, so that they survive pickling.
"""

import re
import traceback
from typing import Literal

from cluster.record import Record

FailureKind = Literal["infrastructure", "model", "data", "bug"]

FATAL_REASONS = frozenset(
    {
        "no-engine",
        "pool-lost",
        "adapter-unknown",
        "adapter-refused",
        "no-worker",
        "retrieval-gone",
        "retrieval-inexact",
        "other-sandbox",
        "endpoint-auth",
        "endpoint-model",
        "endpoint-quota",
        "endpoint-refuses",
        "endpoint-browses",
        "endpoint-gone",
    }
)
"""Infrastructure that will not come back within this run."""


class Failure(Record):
    """Why a forecast has no usable report."""

    kind: FailureKind
    reason: str
    """A short, stable name that reports group by, such as `no-answer` or `engine-lost`."""
    detail: str = ""
    """What a person needs to find the cause; may be long."""

    @property
    def fatal(self) -> bool:
        """Whether repeating the attempt cannot help: the run stops, and nothing is written off."""
        return self.reason in FATAL_REASONS


class PastcastError(Exception):
    """An error that we name: its message says what was wrong, where, and what to do."""


class SettingsError(PastcastError):
    """The settings are wrong; nothing was started."""


class DataError(PastcastError):
    """An input file or row is wrong."""


class Interrupted(PastcastError):
    """A signal ended a run before it was whole, and what was to follow it with it; the message says how to go on."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message, signal)
        self.signal = signal

    def __str__(self) -> str:
        return str(self.args[0])


class InfrastructureError(PastcastError):
    """Something under the run failed (an engine, a shard, a node): the attempt is repeated elsewhere, never scored.

    `reason` is the stable name under which reports count it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    @property
    def fatal(self) -> bool:
        """Whether repeating the attempt cannot help: the run stops, and nothing is written off."""
        return self.reason in FATAL_REASONS

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def failure_of(error: Exception) -> Failure:
    """What an attempt that raised `error` failed of: ours say so themselves, any other is a bug, with its traceback."""
    if isinstance(error, InfrastructureError):
        return Failure(kind="infrastructure", reason=error.reason, detail=error.detail)
    # Ray names a remote error `RayTaskError(KeyError)`; its text ends with the remote traceback.
    name = re.sub(r"^.*\(|\)$", "", type(error).__name__)
    reason = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()
    if isinstance(error, PastcastError):
        return Failure(kind="data", reason=reason, detail=str(error))
    return Failure(kind="bug", reason=reason, detail="".join(traceback.format_exception(error)))
