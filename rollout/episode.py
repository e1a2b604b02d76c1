"""The steps of a run and their order: what may start at once and what waits for an earlier date.

No-tools and memory-free steps are independent. The memory-on steps of one (event, rollout) form a chain: each starts
when the one before has its record, with the last valid notebook, also when that record is a failure.

A schedule and a chain hold dates, not keys: a run has tens of thousands of forecasts, and a key is made when it is looked at.
"""

import dataclasses
import datetime as dt
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from rollout.record import MODES, ForecastKey, Mode


@dataclasses.dataclass(frozen=True)
class Schedule(Sequence[ForecastKey]):
    """Every forecast of a run: events × modes × rollouts × dates, in this order."""

    model: str
    dates: Mapping[str, tuple[dt.date, ...]]
    """Event id → days; both in order."""
    modes: tuple[Mode, ...]
    rollouts: int

    def __len__(self) -> int:
        return len(self.modes) * self.rollouts * sum(map(len, self.dates.values()))

    def __iter__(self) -> Iterator[ForecastKey]:
        for event, days in self.dates.items():
            for mode, rollout, day in itertools.product(self.modes, range(self.rollouts), days):
                yield ForecastKey(model=self.model, event=event, date=day, mode=mode, rollout=rollout)

    @overload
    def __getitem__(self, index: int) -> ForecastKey: ...

    @overload
    def __getitem__(self, index: slice) -> list[ForecastKey]: ...

    def __getitem__(self, index: int | slice) -> ForecastKey | list[ForecastKey]:
        """A walk from the beginning: for the first few keys, not for access at random."""
        if isinstance(index, slice):
            return list(itertools.islice(self, *index.indices(len(self))))
        place = range(len(self))[index]
        return next(itertools.islice(self, place, None))


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """Forecasts that must run one after the other."""

    model: str
    event: str
    mode: Mode
    rollout: int
    dates: tuple[dt.date, ...]
    """In order."""

    def __len__(self) -> int:
        return len(self.dates)

    def key(self, step: int) -> ForecastKey:
        """Of its step, counted from 0."""
        return ForecastKey(
            model=self.model, event=self.event, date=self.dates[step], mode=self.mode, rollout=self.rollout
        )

    @property
    def keys(self) -> tuple[ForecastKey, ...]:
        """Of all its steps."""
        return tuple(map(self.key, range(len(self.dates))))


def schedule(model: str, dates: Mapping[str, Sequence[dt.date]], modes: Iterable[Mode], count: int) -> Schedule:
    """Every forecast of a run. `dates` maps event id → days, `count` is the number of rollouts; no order is asked of any."""
    chosen = set(modes)
    return Schedule(
        model=model,
        dates={event: tuple(sorted(dates[event])) for event in sorted(dates)},
        modes=tuple(m for m in MODES if m in chosen),
        rollouts=count,
    )


def chains(keys: Iterable[ForecastKey]) -> list[Chain]:
    """The keys as chains, the longest first, so that the end of a run is not the tail of one chain."""
    made: list[Chain] = []
    places: dict[tuple[str, str, int], int] = {}
    """Of memory-on chains in `made`."""
    same: dict[tuple[dt.date, ...], tuple[dt.date, ...]] = {}
    """Equal dates, which are held once."""
    for key in keys:
        place = len(made)
        if key.mode == "memory-on":
            place = places.setdefault((key.model, key.event, key.rollout), place)
        earlier = made[place].dates if place < len(made) else ()
        days = tuple(sorted((*earlier, key.date)))
        chain = Chain(key.model, key.event, key.mode, key.rollout, same.setdefault(days, days))
        made[place : place + 1] = [chain]
    return sorted(made, key=lambda c: -len(c))
