"""How a run goes and how it ended, as values: for the terminal, for callers, for the exit status."""

from collections.abc import Callable

from cluster.record import Record
from rollout.wants import HaltReason


class Progress(Record):
    """The state of a run at one moment, for the terminal."""

    total: int
    done: int
    running: int
    failures: dict[str, int]
    retried: int
    """Attempts that infrastructure failed and that were queued again."""
    output_tokens: int
    price: float
    """US dollars, of earlier sittings too."""
    seconds: float
    """Since the first lease of this process."""
    done_now: int
    """Of `done`, by this process."""
    stage: str


class Bug(Record):
    """Forecasts that ended in the same bug of ours."""

    reason: str
    traceback: str
    count: int


class RunSummary(Record):
    """How a run ended."""

    scheduled: int
    recorded: int
    """Records in the ledger, of this process and earlier ones."""
    recorded_now: int
    failures: dict[str, int]
    retried: int
    reopened: int
    """Forecasts whose earlier records `--retry` took back."""
    ended: HaltReason
    """Why no more was done: all is recorded, it was asked to stop, or a budget is spent."""
    signal: int | None
    """The signal that asked it to stop."""
    lost: int
    """Forecasts in the ledger as infrastructure failures, after every attempt failed."""
    bugs: int
    """Forecasts in the ledger that ended in a bug of ours."""
    tracebacks: tuple[Bug, ...]
    """Those of this process, the most frequent first."""
    seconds: float
    output_tokens: int
    price: float
    """US dollars, of earlier sittings too."""


Report = Callable[[Progress], None]
