"""DayTable: where every day of a shard begins, so that a cutoff is a row count.

Rows of a shard are ordered by day; the articles visible from a first day to a cutoff day, both inclusive, are
therefore one run of rows. A table that does not describe such an order cannot be made.
"""

import datetime as dt
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Self

from pydantic import StrictInt, model_validator

from cluster.record import Record


def require_day(value: object, what: str) -> dt.date:
    """The value if it is a calendar day. Raises TypeError for anything else, a datetime included: it has no UTC day yet."""
    if type(value) is not dt.date:
        raise TypeError(f"{what} must be a datetime.date, not {value!r}; derive the UTC day where the instant is known")
    return value


class DayTable(Record):
    """The days on which a shard has articles, and the first row of each."""

    rows: StrictInt
    """Number of rows in the shard, at least one."""
    days: tuple[dt.date, ...]
    """Strictly increasing."""
    first_rows: tuple[StrictInt, ...]
    """One per day, strictly increasing from 0, below `rows`."""

    @model_validator(mode="after")
    def _describes_an_order(self) -> Self:
        if not self.days or len(self.days) != len(self.first_rows):
            raise ValueError(
                f"{len(self.days)} days but {len(self.first_rows)} first rows; one of each per day is needed"
            )
        if self.first_rows[0] != 0:
            raise ValueError(f"the first day starts at row {self.first_rows[0]}, so earlier rows would have no day")
        if any(b <= a for a, b in pairwise(self.days)) or any(b <= a for a, b in pairwise(self.first_rows)):
            raise ValueError("days and their first rows must both increase")
        if self.first_rows[-1] >= self.rows:
            raise ValueError(f"the last day starts at row {self.first_rows[-1]} of {self.rows}")
        return self

    @classmethod
    def of_rows(cls, days: list[dt.date]) -> "DayTable":
        """The table of a shard whose rows have these days. Raises ValueError if they ever decrease."""
        firsts = [row for row, day in enumerate(days) if row == 0 or days[row - 1] != day]
        return cls(rows=len(days), days=tuple(days[row] for row in firsts), first_rows=tuple(firsts))

    def visible(self, first_day: dt.date | None, cutoff: dt.date) -> tuple[int, int]:
        """The rows [low, high) published from `first_day` (None: the beginning) to `cutoff`, both inclusive.

        Empty ranges have low == high. Raises TypeError if a day is not a plain date.
        """
        high = self._start(bisect_right(self.days, require_day(cutoff, "a cutoff")))
        if first_day is None:
            return 0, high
        low = self._start(bisect_left(self.days, require_day(first_day, "a first day")))
        return min(low, high), high

    def day_of(self, row: int) -> dt.date:
        """The day of a row. Raises IndexError if there is no such row."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        return self.days[bisect_right(self.first_rows, row) - 1]

    def counts(self) -> dict[dt.date, int]:
        """Articles per day, for days that have any."""
        return {day: self._start(i + 1) - self._start(i) for i, day in enumerate(self.days)}

    def _start(self, index: int) -> int:
        return self.first_rows[index] if index < len(self.days) else self.rows
