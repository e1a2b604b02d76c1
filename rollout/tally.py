"""Sums over the records of a run, and the budgets that they end: what was spent, and how much of it failed."""

import dataclasses
from collections import Counter

from cluster.failures import FailureKind
from rollout.limits import Limits
from rollout.packed import PackedForecast
from rollout.wants import HaltReason


@dataclasses.dataclass
class Tally:
    """Sums over records of a run."""

    failures: Counter[str] = dataclasses.field(default_factory=Counter)
    """By reason."""
    kinds: Counter[FailureKind] = dataclasses.field(default_factory=Counter)
    price: float = 0.0
    """US dollars."""
    output_tokens: int = 0

    def add(self, packed: PackedForecast) -> None:
        """Count one record."""
        self.price += packed.price
        self.output_tokens += packed.output_tokens
        if packed.failure is not None:
            self.failures[packed.failure.reason] += 1
            self.kinds[packed.failure.kind] += 1


class Budgets:
    """What counts at once, before it is recorded: a run must not go on spending while its ledger is slow."""

    def __init__(self, limits: Limits, earlier: Tally) -> None:
        """`earlier` sums up the records of earlier sittings, so that budgets hold over all of them."""
        self._limits = limits
        self._kinds = Counter(earlier.kinds)
        self._owed = 0.0
        """US dollars that attempts without a record cost and that no record carries yet."""
        self.spent = earlier.price
        """US dollars, of records and of this sitting's failed attempts."""

    def owe(self, price: float) -> None:
        """An attempt that leaves no record cost this much: it counts at once, and is in the ledger with the next record."""
        self.spent += price
        self._owed += price

    def take(self, packed: PackedForecast) -> PackedForecast:
        """A record has come; what is returned is to be stored: it carries what is owed."""
        self.spent += packed.price
        if packed.failure is not None:
            self._kinds[packed.failure.kind] += 1
        if self._owed:
            packed, self._owed = packed.model_copy(update={"price": packed.price + self._owed}), 0.0
        return packed

    def exceeded(self) -> tuple[HaltReason, ...]:
        """The budgets that are spent."""
        limits = self._limits
        spent: dict[HaltReason, bool] = {
            "max-cost": limits.max_cost is not None and self.spent >= limits.max_cost,
            "data-failures": self._kinds["data"] > limits.data_failures,
            "bugs": self._kinds["bug"] > limits.bugs,
        }
        return tuple(reason for reason, over in spent.items() if over)
