"""Why a sitting starts nothing more, and when what still runs is abandoned: a pure class over reasons and times."""

from rollout.wants import Halt


class Closing:
    """Open at first; what was closed is never opened again."""

    def __init__(self) -> None:
        self.halt: Halt | None = None
        """Why nothing is started any more; None while the run goes on."""
        self.stop_at: float | None = None
        """When running steps are abandoned; None: they may finish."""

    @property
    def lost(self) -> bool:
        """Whether infrastructure is gone for good."""
        return self.halt is not None and self.halt.reason == "fatal"

    def close(self, halt: Halt, stop_at: float | None) -> None:
        """Of several reasons the first is given, but one that ends running steps goes before one that lets them finish."""
        if self.halt is None or (self.stop_at is None and stop_at is not None):
            self.halt = halt
        if stop_at is not None:
            self.stop_at = stop_at if self.stop_at is None else min(self.stop_at, stop_at)
