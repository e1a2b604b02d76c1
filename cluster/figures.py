"""The engine's own figures, noted from every iteration of vLLM's scheduler."""

from collections.abc import Callable
from typing import Any

from cluster.call import EngineFigures


class FiguresLog:
    """A stat logger for vLLM that keeps the last state and counts since the start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._noted = clock()
        self._running = self._waiting = 0
        self._kv_cache_use = 0.0
        self._preemptions = self._generated = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: object) -> None:
        """Called by vLLM after every iteration; either may be absent."""
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            self._waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._kv_cache_use = scheduler_stats.kv_cache_usage
            self._noted = self._clock()
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            self._generated += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Part of vLLM's interface; nothing to say."""

    def log(self) -> None:
        """Part of vLLM's interface; nothing to say."""

    def figures(self, unfinished: int) -> EngineFigures:
        """The figures now, given how many requests the engine still holds.

        An idle scheduler does not iterate: what it said last, before its last requests ended or were aborted, is not true any more.
        """
        idle = unfinished == 0
        return EngineFigures(
            running=0 if idle else self._running,
            # What has been handed over since the last iteration waits.
            waiting=0 if idle else max(self._waiting, unfinished - self._running),
            kv_cache_use=0.0 if idle else self._kv_cache_use,
            preemptions=self._preemptions,
            generated_tokens=self._generated,
            age_s=0.0 if idle else self._clock() - self._noted,
        )
