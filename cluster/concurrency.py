"""How many steps may be in flight: adapted to what the engines say of themselves, pure and without a clock.

A unit is one step in flight for each engine that serves. It grows while every engine has room in its KV cache and
nothing waits, is trimmed as the cache fills, and is cut when an engine had to preempt a request: the cache is to stay
below the point where work is thrown away. Without fresh figures of every serving engine nothing changes. The bounds are settings.
"""

from collections.abc import Collection, Mapping

from cluster.call import EngineFigures
from cluster.config import ConcurrencySettings

GROW_BELOW = 0.7
"""Share of the KV cache in use on the fullest engine below which the limit grows."""
TRIM_ABOVE = 0.85
"""Share above which it is trimmed: contexts grow while they decode, so that the rest is soon needed."""
WAITING_SHARE = 0.25
"""Requests waiting, as a share of those running, above which more steps would only queue: the limit stays."""
TRIM_WAITING_SHARE = 1.0
"""Share above which it is trimmed."""
GROWTH = 1.1
"""Factor of one growth, at least one step."""
TRIM = 0.95
"""Factor of one trim, at least one step."""
CUT = 0.75
"""Factor after a preemption."""
IN_USE = 0.8
"""Share of the limit that must be in flight before it grows: a limit that nobody reaches has proved nothing."""


class Concurrency:
    """The limit, moved by one observation at a time."""

    def __init__(self, settings: ConcurrencySettings) -> None:
        self._settings = settings
        self._unit = float(settings.start)
        self._preemptions: dict[tuple[int, int], int] = {}

    def limit(self, serving: int) -> int:
        """Steps that may be in flight over `serving` engines."""
        return int(self._unit) * serving

    def observe(
        self, figures: Mapping[tuple[int, int], EngineFigures], serving: Collection[tuple[int, int]], in_flight: int
    ) -> None:
        """Take in the fresh figures by (engine, incarnation); `in_flight`: steps that are.

        Call it once for each round of figures: every call may move the limit by one step.
        """
        if not serving or any(engine not in figures for engine in serving):
            return
        seen = [(engine, figures[engine]) for engine in serving]
        preempted = any(f.preemptions > self._preemptions.get(engine, f.preemptions) for engine, f in seen)
        self._preemptions = {engine: f.preemptions for engine, f in seen}
        fullest = max(f.kv_cache_use for _, f in seen)
        queue = max(f.waiting / max(1, f.running) for _, f in seen)
        if preempted:
            self._set(self._unit * CUT)
        elif fullest > TRIM_ABOVE or queue > TRIM_WAITING_SHARE:
            self._set(min(self._unit * TRIM, self._unit - 1))
        elif fullest < GROW_BELOW and queue <= WAITING_SHARE and in_flight >= IN_USE * self.limit(len(serving)):
            self._set(max(self._unit * GROWTH, self._unit + 1))

    def _set(self, unit: float) -> None:
        self._unit = min(float(self._settings.maximum), max(float(self._settings.minimum), unit))
