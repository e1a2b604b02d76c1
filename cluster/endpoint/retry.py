"""How often one call is tried again, and after how long: the sequences of OracleProto's Table 20, one for each class.

A sequence is consumed in order, one entry for each failure of its class; when it is spent, the call has failed. The
paper resets them for each question; here each model call has its own, because a step may make 120 of them. A blacklisted
key, and a limited one while another is free, consume nothing (Table 14).
"""

from collections import Counter
from typing import Literal

from cluster.config import ServerSettings
from cluster.endpoint.fault import FaultKind

RetryClass = Literal["network", "rate-limit", "server"]

_CLASSES: dict[FaultKind, RetryClass] = {
    "network": "network",
    "malformed": "network",
    "server": "server",
    "rate-limit": "rate-limit",
    "quota": "rate-limit",
}


class Retries:
    """The tries of one call."""

    def __init__(self, settings: ServerSettings) -> None:
        self._sequences: dict[RetryClass, tuple[float, ...]] = {
            "network": settings.network_backoff_s,
            "rate-limit": settings.rate_limit_backoff_s,
            "server": settings.server_backoff_s,
        }
        self._used: Counter[RetryClass] = Counter()

    def wait_s(self, kind: FaultKind) -> float | None:
        """Seconds before the next try after such a fault; None if there is none. Consumes an entry."""
        found = _CLASSES.get(kind)
        if found is None:
            return None
        sequence = self._sequences[found]
        number = self._used[found]
        if number >= len(sequence):
            return None
        self._used[found] += 1
        return sequence[number]
