"""Forecast dates against values worked by hand from Forecast-Dojo A.3."""

import datetime as dt

from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ScheduleSettings
from rollout.events.dates import forecast_dates
from rollout.events.event import Belief, Event

SCHEDULE = ScheduleSettings()
FIRST = dt.date(2030, 1, 1)


def day(number: int) -> dt.date:
    """January `number`, 2030 (running on into later months)."""
    return FIRST + dt.timedelta(days=number - 1)


def event(last: int, beliefs: dict[int, Belief] | None = None, options: tuple[str, ...] = ("YES", "NO")) -> Event:
    return Event(
        id="e",
        source="s",
        question="q",
        options=options,
        opened=dt.datetime(2030, 1, 1, 23, 59, tzinfo=dt.UTC),
        closed=dt.datetime.combine(day(last), dt.time(0, 1), dt.UTC),
        outcome=options[:1],
        beliefs={day(n): b for n, b in (beliefs or {}).items()},
    )


def numbers(dates: tuple[dt.date, ...]) -> list[int]:
    return [(d - FIRST).days + 1 for d in dates]


def test_without_signals_the_last_day_of_each_bin_is_taken() -> None:
    # Close on the 12th: eligible 1..10, n = 10, T = round(3.16) = 3, bins 1-3, 4-6, 7-10.
    assert numbers(forecast_dates(event(12), {}, None, SCHEDULE)) == [3, 6, 10]


def test_movement_outweighs_activity_and_activity_outweighs_recency() -> None:
    beliefs = {1: {"YES": 0.5}, 2: {"YES": 0.7}, 3: {"YES": 0.7}, 6: {"YES": 0.6}, 7: {"YES": 0.5}, 8: {"YES": 0.5}}
    activity = {day(3): 10, day(4): 5, day(8): 10}
    # b: day 2 -> .2, day 7 -> .1, max .2; day 6 has no day 5. c: 3 -> 1, 4 -> .5, 8 -> 1.
    # Bin 1-3: .7 + .001/9, .3 + .002/9 -> 2. Bin 4-6: .15 -> 4. Bin 7-10: .35 and .3 -> 7.
    assert numbers(forecast_dates(event(12, beliefs), activity, None, SCHEDULE)) == [2, 4, 7]


def test_several_options_move_by_half_the_summed_change_over_those_priced_on_both_days() -> None:
    options = ("A", "B", "C")
    beliefs: dict[int, Belief] = {
        1: {"A": 0.5, "B": 0.5},
        2: {"A": 0.3, "B": 0.4, "C": 0.3},
        3: {"A": 0.1, "B": 0.4, "C": 0.5},
    }
    # Day 2: (.2 + .1) / 2 = .15 (C was not priced the day before); day 3: (.2 + 0 + .2) / 2 = .2.
    assert numbers(forecast_dates(event(12, beliefs, options), {}, None, SCHEDULE)) == [3, 6, 10]
    beliefs[3] = {"A": 0.2, "B": 0.4, "C": 0.4}
    assert numbers(forecast_dates(event(12, beliefs, options), {}, None, SCHEDULE)) == [2, 6, 10]


def test_the_number_of_dates_is_the_rounded_root_between_three_and_ten() -> None:
    def count(n: int) -> int:
        return len(forecast_dates(event(n + 2), {}, None, SCHEDULE))

    assert [count(n) for n in (2, 3, 12, 13, 20, 21, 90, 91, 400)] == [0, 3, 3, 4, 4, 5, 9, 10, 10]


def test_days_before_the_first_article_are_not_eligible() -> None:
    # From the 4th: eligible 4..10, n = 7, T = 3, bins 4-5, 6-7, 8-10.
    assert numbers(forecast_dates(event(12), {}, day(4), SCHEDULE)) == [5, 7, 10]
    assert forecast_dates(event(12), {}, day(9), SCHEDULE) == ()
    assert forecast_dates(event(12), {}, day(40), SCHEDULE) == ()


@given(
    st.integers(2, 200),
    st.integers(-5, 60),
    st.dictionaries(st.integers(1, 200), st.integers(0, 50)),
    st.dictionaries(st.integers(1, 200), st.floats(0, 1)),
)
def test_dates_are_distinct_ordered_and_clear_of_the_close_and_of_the_time_without_news(
    last: int, first_article: int, activity: dict[int, int], prices: dict[int, float]
) -> None:
    e = event(last, {n: {"YES": p} for n, p in prices.items()})
    dates = forecast_dates(e, {day(n): c for n, c in activity.items()}, day(first_article), SCHEDULE)
    assert list(dates) == sorted(set(dates))
    assert len(dates) == 0 or 3 <= len(dates) <= 10
    assert all(max(1, first_article) <= n <= last - 2 for n in numbers(dates))
