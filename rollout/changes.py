"""What happens to a ledger, as values: forecasts are recorded, and records are taken back. Nothing else ever happens to one."""

import datetime as dt
from typing import Self

from cluster.failures import FailureKind
from cluster.record import Record
from rollout.packed import PackedForecast
from rollout.record import ForecastKey


class Retried(Record):
    """What a retry opened again."""

    failures: dict[str, int]
    """Records that were failures, by reason."""
    later_steps: int
    """Records of later dates of the same memory-on chains: they were made from notebooks that the retry replaces."""

    @property
    def total(self) -> int:
        """Forecasts that are open again."""
        return sum(self.failures.values()) + self.later_steps


class Committed(Record):
    """A change of the ledger: a forecast was recorded. As it is stored, nothing parsed."""

    change: int
    at: dt.datetime
    key: ForecastKey
    kind: FailureKind | None
    reason: str | None
    notebook: str | None
    """NotebookState as JSON."""
    output_tokens: int
    price: float
    record: str
    trajectory: bytes | None
    """Packed."""

    @classmethod
    def of(cls, forecast: PackedForecast, change: int, at: dt.datetime) -> Self:
        """The change numbered `change` that records a forecast."""
        failure = forecast.failure
        return cls(
            change=change,
            at=at,
            key=forecast.key,
            kind=failure.kind if failure else None,
            reason=failure.reason if failure else None,
            notebook=None if forecast.notebook is None else forecast.notebook.model_dump_json(),
            output_tokens=forecast.output_tokens,
            price=forecast.price,
            record=forecast.record,
            trajectory=forecast.trajectory,
        )


class Superseded(Record):
    """A change of the ledger: a record was taken back and its key is open again."""

    change: int
    forecast: int
    """The change that had recorded it."""
    at: dt.datetime
    why: str


Change = Committed | Superseded
