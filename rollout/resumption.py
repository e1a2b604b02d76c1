"""What earlier sittings of a run left in its ledger, for the coordinator that goes on: read when it is asked for, and not held."""

from collections import Counter
from collections.abc import Iterator, Mapping

from rollout.ledger import Ledger
from rollout.notebook import NotebookState
from rollout.record import ForecastKey
from rollout.tally import Tally


class Recorded(Mapping[ForecastKey, NotebookState | None]):
    """The forecasts that have a record → the notebook each left. Holds while nothing is committed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __contains__(self, key: object) -> bool:
        return isinstance(key, ForecastKey) and self._ledger.holds(key)

    def __getitem__(self, key: ForecastKey) -> NotebookState | None:
        return self._ledger.notebook(key)

    def __iter__(self) -> Iterator[ForecastKey]:
        return iter(self._ledger.finished())

    def __len__(self) -> int:
        return self._ledger.counts()[1]


def earlier_tally(ledger: Ledger) -> Tally:
    """Sums over the records; the price also of what was taken back, since it was paid for."""
    return Tally(failures=Counter(ledger.failures()), kinds=Counter(ledger.kinds()), price=ledger.spent()[1])
