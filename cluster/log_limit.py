"""Log lines that repeat themselves are counted: one kind prints once, then again after an interval with the count since.

A run that loses a node says so in a line, not in a line for each of its thousand steps. Nothing is lost in silence:
`flush` prints what was counted and not said.
"""

import logging
from collections.abc import Callable

from cluster.clock import monotonic

INTERVAL_SECONDS = 60.0
"""Between two lines of one kind."""


class LogLimit:
    """A limit on one logger. Used by one thread at a time."""

    def __init__(
        self, logger: logging.Logger, interval_s: float = INTERVAL_SECONDS, clock: Callable[[], float] = monotonic
    ) -> None:
        self._logger = logger
        self._interval = interval_s
        self._clock = clock
        self._printed: dict[str, float] = {}
        self._silent: dict[str, tuple[int, int]] = {}
        """By kind: the level of what was not printed, and how often."""

    def warning(self, kind: str, message: str, *args: object) -> None:
        """A line of this kind at level WARNING, printed or counted."""
        self._log(logging.WARNING, kind, message, args)

    def error(self, kind: str, message: str, *args: object) -> None:
        """A line of this kind at level ERROR, printed or counted."""
        self._log(logging.ERROR, kind, message, args)

    def flush(self) -> None:
        """Print the counts of what was not printed."""
        for kind, (level, count) in sorted(self._silent.items()):
            self._logger.log(level, "%s: %d more", kind, count)
            self._printed[kind] = self._clock()
        self._silent.clear()

    def _log(self, level: int, kind: str, message: str, args: tuple[object, ...]) -> None:
        now = self._clock()
        _, silent = self._silent.get(kind, (level, 0))
        last = self._printed.get(kind)
        if last is not None and now - last < self._interval:
            self._silent[kind] = (level, silent + 1)
            return
        self._printed[kind] = now
        self._silent.pop(kind, None)
        since = f" ({kind}: {silent + 1} in {now - last:.0f} s)" if last is not None and silent else ""
        # A "%" in the count's kind is text, not a format.
        self._logger.log(level, message + since.replace("%", "%%"), *args)
