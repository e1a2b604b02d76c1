"""Which days of an event are forecast (Forecast-Dojo A.3).

Pure: a function of the event, the corpus' daily article counts and the settings. The days come from the actual close,
which no agent sees; a day within the buffer before it, or before the first article, is never chosen, and an event with
fewer eligible days than the minimum number of steps has none rather than all.
"""

import datetime as dt
import math
from collections.abc import Mapping, Sequence

from cluster.config import ScheduleSettings
from retrieval.article import utc_day
from rollout.events.event import Belief, Event

TOO_FEW_DAYS = "too-few-eligible-days"
"""The reason under which a caller counts an event without forecast dates."""


def forecast_dates(
    event: Event, activity: Mapping[dt.date, int], first_article_day: dt.date | None, schedule: ScheduleSettings
) -> tuple[dt.date, ...]:
    """The forecast dates in order, or none if the event has too few eligible days (TOO_FEW_DAYS).

    `activity` is the number of articles published on each UTC day in the whole corpus; absent days count 0.
    T = clamp(round(sqrt n), minimum, maximum) for n eligible days; sqrt n is never half-way between two integers, so
    rounding is unambiguous. Bin i of T holds the eligible days floor(i n / T) to floor((i + 1) n / T) - 1; the day of
    highest score 0.7 b + 0.3 c + 0.001 j / (n - 1) is taken from each, where b is market movement and c activity, each
    divided by its maximum over the eligible days. A signal that is missing is 0, and equal scores go to the later day.
    """
    days = eligible_days(event, first_article_day, schedule.buffer_days)
    n = len(days)
    if n < schedule.minimum:
        return ()
    steps = min(max(round(math.sqrt(n)), schedule.minimum), schedule.maximum)
    movement = _max_normalized([_movement(event, day) for day in days])
    news = _max_normalized([float(activity.get(day, 0)) for day in days])
    scores = [
        schedule.belief_weight * movement[j]
        + schedule.activity_weight * news[j]
        + (schedule.recency_weight * j / (n - 1) if n > 1 else 0.0)
        for j in range(n)
    ]
    bins = [range(i * n // steps, (i + 1) * n // steps) for i in range(steps)]
    return tuple(days[max(bin_, key=lambda j: (scores[j], j))] for bin_ in bins)


def eligible_days(event: Event, first_article_day: dt.date | None, buffer_days: int) -> tuple[dt.date, ...]:
    """The UTC days from opening to `buffer_days` before the close, none before the first article."""
    first = utc_day(event.opened)
    if first_article_day is not None:
        first = max(first, first_article_day)
    last = utc_day(event.closed) - dt.timedelta(days=buffer_days)
    return tuple(first + dt.timedelta(days=i) for i in range((last - first).days + 1))


def _movement(event: Event, day: dt.date) -> float:
    """|change of the first option| for two options, half the summed change for more; 0 without both days' beliefs."""
    today, yesterday = event.beliefs.get(day), event.beliefs.get(day - dt.timedelta(days=1))
    if today is None or yesterday is None:
        return 0.0
    changes = _changes(event.options, today, yesterday)
    if len(event.options) == 2:
        return next(iter(changes), 0.0)
    return sum(changes) / 2


def _changes(options: Sequence[str], today: Belief, yesterday: Belief) -> list[float]:
    return [abs(today[o] - yesterday[o]) for o in options if o in today and o in yesterday]


def _max_normalized(values: Sequence[float]) -> list[float]:
    largest = max(values)
    return [v / largest if largest > 0 else 0.0 for v in values]
