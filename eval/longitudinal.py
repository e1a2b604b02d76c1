"""Scores along an event's life: Brier by third of the relative step position (Forecast-Dojo B.6, panel a).

Position is (t-1)/(T-1) on the event's scheduled dates, so that a missing record moves no other forecast. Only events
that stand in all three thirds are kept, and each weighs the same, whatever its number of dates and rollouts.
"""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from cluster.config import ScoreSettings
from cluster.record import Record
from eval.bootstrap import Interval, clustered_mean
from eval.scoring import ScoredForecast, brier

Stage = Literal["early", "middle", "late"]
STAGES: tuple[Stage, ...] = ("early", "middle", "late")


class StageScores(Record):
    """Mean Brier [0, 2] of one third, events weighing the same."""

    stage: Stage
    brier: Interval
    uniform: float
    market: float | None
    """None unless every kept forecast has a whole market distribution."""
    floor: float | None
    """None unless every kept forecast has a floor."""


class StageTable(Record):
    """The three thirds, over the same events each."""

    stages: tuple[StageScores, ...]
    """Early, middle, late; empty when no event stands in all three."""
    events: int
    left_out: int
    """Events with forecasts that do not stand in all three thirds (after `market_dates_only`)."""
    market_dates_only: bool
    """Whether dates without a market probability were left out, as B.6 does; they are kept where no date has one."""


def stage_of(position: int, count: int) -> Stage | None:
    """The third of (position)/(count-1), `position` counted from 0; None when there is only one date."""
    if count < 2:
        return None
    return STAGES[min(2, 3 * position // (count - 1))]


def stage_table(
    forecasts: Sequence[ScoredForecast], schedule: Mapping[str, Sequence[dt.date]], settings: ScoreSettings
) -> StageTable:
    """Brier by stage. `schedule` holds each event's forecast dates in order."""
    market_only = any(f.market_probability is not None for f in forecasts)
    position = {event: {day: i for i, day in enumerate(days)} for event, days in schedule.items()}
    staged: dict[str, dict[Stage, list[ScoredForecast]]] = {}
    for forecast in forecasts:
        event, day = forecast.key.event, forecast.key.date
        stage = stage_of(position[event][day], len(position[event]))
        by_stage = staged.setdefault(event, {})
        if stage is not None and not (market_only and forecast.market_probability is None):
            by_stage.setdefault(stage, []).append(forecast)
    kept = {event: by_stage for event, by_stage in sorted(staged.items()) if len(by_stage) == len(STAGES)}
    return StageTable(
        stages=tuple(_stage(stage, [(e, by[stage]) for e, by in kept.items()], settings) for stage in STAGES)
        if kept
        else (),
        events=len(kept),
        left_out=len(staged) - len(kept),
        market_dates_only=market_only,
    )


def _stage(stage: Stage, events: Sequence[tuple[str, list[ScoredForecast]]], settings: ScoreSettings) -> StageScores:
    def event_means(value: Callable[[ScoredForecast], float]) -> list[float]:
        return [sum(map(value, group)) / len(group) for _, group in events]

    def reference(distribution: Callable[[ScoredForecast], dict[str, float] | None]) -> float | None:
        means = []
        for _, group in events:
            values = [brier(d, f.outcome) for f in group if (d := distribution(f)) is not None]
            if len(values) < len(group):
                return None
            means.append(sum(values) / len(values))
        return sum(means) / len(means)

    interval = clustered_mean(event_means(lambda f: f.scores.brier), [name for name, _ in events], settings)
    if interval is None:
        raise ValueError(f"stage {stage} has no events")
    uniform = event_means(lambda f: 1.0 - 1.0 / len(f.options))
    return StageScores(
        stage=stage,
        brier=interval,
        uniform=sum(uniform) / len(uniform),
        market=reference(lambda f: f.market),
        floor=reference(lambda f: f.floor),
    )
