"""Permission to run one step once, and what became of it: what passes between the coordinator and a worker."""

from cluster.failures import Failure
from cluster.record import Record
from rollout.notebook import NotebookState
from rollout.packed import PackedForecast
from rollout.record import ForecastKey


class Lease(Record):
    """One attempt at one step."""

    number: int
    """Unique within the sitting."""
    key: ForecastKey
    attempt: int
    """From 1."""
    carried: NotebookState | None
    """memory-on: what the chain's earlier steps left."""
    last: bool
    """Whether no later step of the chain is to follow: its engine session may be released."""


class StepOutcome(Record):
    """What became of one lease: a packed record or a failure of the attempt, never both."""

    lease: int
    """Its number."""
    packed: PackedForecast | None = None
    failure: Failure | None = None
    """Infrastructure (to be repeated), data or a bug of ours (to be recorded)."""
    seconds: float = 0.0
    """Wall-clock seconds of the attempt."""
    price: float = 0.0
    """US dollars that a failed attempt cost; a record carries its own."""
