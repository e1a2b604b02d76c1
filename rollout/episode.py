"""The steps of a run and their order: what may start at once and what waits for an earlier date.

No-tools and memory-free steps are independent. The memory-on steps of one (event, rollout) form a chain: each starts
when the one before has its record, with the last valid notebook, also when that record is a failure.
"""

from collections.abc import Iterable, Mapping, Sequence

from cluster.record import Record
from rollout.record import MODES, ForecastKey, Mode


class Chain(Record):
    """Forecasts that must run one after the other."""

    keys: tuple[ForecastKey, ...]


def schedule(model: str, dates: Mapping[str, Sequence[object]], modes: Iterable[Mode], count: int) -> list[ForecastKey]:
    """Every forecast of a run: events × modes × rollouts × dates, in a fixed order. `dates` maps event id → days."""
    chosen = [m for m in MODES if m in set(modes)]
    return [
        ForecastKey.model_validate({"model": model, "event": event, "date": day, "mode": mode, "rollout": rollout})
        for event in sorted(dates)
        for mode in chosen
        for rollout in range(count)
        for day in sorted(dates[event], key=str)
    ]


def chains(keys: Iterable[ForecastKey]) -> list[Chain]:
    """The keys as chains, the longest first, so that the end of a run is not the tail of one chain."""
    grouped: dict[tuple[object, ...], list[ForecastKey]] = {}
    for key in keys:
        own = () if key.mode == "memory-on" else (key.date,)
        grouped.setdefault((key.model, key.event, key.mode, key.rollout, *own), []).append(key)
    made = [Chain(keys=tuple(sorted(group, key=lambda k: k.date))) for group in grouped.values()]
    return sorted(made, key=lambda c: -len(c.keys))
