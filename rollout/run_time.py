"""Run time: seconds without those in which the engine pool was paused. Deadlines of steps and episodes stand still meanwhile."""


class RunTime:
    """Told when the pool is paused and when it goes on, by any one clock."""

    def __init__(self) -> None:
        self._paused_since: float | None = None
        self._paused_before = 0.0

    @property
    def stands(self) -> bool:
        """Whether it is paused."""
        return self._paused_since is not None

    def pause(self, now: float) -> None:
        """It stands still from now on; telling it twice changes nothing."""
        if self._paused_since is None:
            self._paused_since = now

    def go_on(self, now: float) -> None:
        """It runs again; telling it twice changes nothing."""
        if self._paused_since is not None:
            self._paused_before += now - self._paused_since
            self._paused_since = None

    def at(self, now: float) -> float:
        """The run time at a time of the clock."""
        return (now if self._paused_since is None else self._paused_since) - self._paused_before

    def clock(self, deadline: float) -> float:
        """The time of the clock at a run time that is still to come, if there is no further pause."""
        return deadline + self._paused_before

    def past(self, deadline: float, now: float) -> bool:
        """Whether a run time is over: by the sum that `clock` gives, since a difference may be rounded to just before it, and who
        waits until then would wait for ever."""
        return not self.stands and self.clock(deadline) <= now
