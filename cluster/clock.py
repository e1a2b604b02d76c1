"""The wall clock of real runs. Whatever writes a time down is given a clock, so that tests and simulations hold it."""

import datetime as dt
import time
from collections.abc import Callable

Clock = Callable[[], dt.datetime]
"""Answers the present moment, in UTC."""


def utc_now() -> dt.datetime:
    """The present moment of this machine."""
    return dt.datetime.now(dt.UTC)


def monotonic() -> float:
    """Seconds that only grow, for intervals."""
    return time.monotonic()
