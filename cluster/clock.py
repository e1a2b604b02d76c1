"""The clocks of real runs. Whatever writes a time down is given a clock, so that tests and simulations hold it."""

import asyncio
import datetime as dt
import time
from collections.abc import Callable

Clock = Callable[[], dt.datetime]
"""Answers the present moment, in UTC."""


def utc_now() -> dt.datetime:
    """The present moment of this machine."""
    return dt.datetime.now(dt.UTC)


def monotonic() -> float:
    """Seconds that only grow, for intervals: of the event loop that runs here. In every real run that is this machine's
    clock, in the simulator the virtual one."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
