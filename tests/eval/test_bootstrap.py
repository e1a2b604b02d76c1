"""Clustered intervals and paired differences."""

import datetime as dt
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import ScoreSettings
from cluster.failures import DataError
from eval.bootstrap import clustered_mean, paired_difference
from eval.scoring import ScoredForecast, score_forecast
from rollout.events.event import Event
from rollout.record import ForecastKey, ForecastRecord
from rollout.report import Report

SMALL = ScoreSettings(draws=300)
DAY = dt.date(2025, 3, 3)


def forecast(event: str, p: float, model: str = "m", rollout: int = 0) -> ScoredForecast:
    known = Event(
        id=event,
        source="test",
        question="?",
        options=("Yes", "No"),
        opened=dt.datetime(2025, 3, 1, tzinfo=dt.UTC),
        closed=dt.datetime(2025, 4, 1, tzinfo=dt.UTC),
        outcome=("Yes",),
    )
    key = ForecastKey(model=model, event=event, date=DAY, mode="no-tools", rollout=rollout)
    report = Report(probabilities={"Yes": p, "No": 1 - p}, verdict="ok", usable_strict=True, usable_lenient=True)
    scored = score_forecast(ForecastRecord(key=key, options=("Yes", "No"), report=report, prompt="p"), known, None)
    assert scored is not None
    return scored


def test_two_events_have_three_possible_means() -> None:
    # Draws of two events give both means of one event (1/4 each) and the joint mean (1/2): 2.5 % and 97.5 % are the ends.
    interval = clustered_mean([0.0, 0.0, 0.0, 1.0], ["a", "a", "a", "b"], ScoreSettings())
    assert interval is not None
    assert (interval.mean, interval.low, interval.high) == (0.25, 0.0, 1.0)
    assert (interval.n, interval.events) == (4, 2)


def test_one_event_has_a_mean_and_no_interval() -> None:
    interval = clustered_mean([0.2, 0.4], ["a", "a"], SMALL)
    assert interval is not None
    assert interval.mean == pytest.approx(0.3)
    assert interval.low is None
    assert interval.high is None


def test_nothing_has_no_mean() -> None:
    assert clustered_mean([], [], SMALL) is None


def test_repeating_every_forecast_of_an_event_adds_no_certainty() -> None:
    values, names = [0.1, 0.5, 0.9, 0.3], ["a", "b", "c", "d"]
    once = clustered_mean(values, names, SMALL)
    thrice = clustered_mean(values * 3, names * 3, SMALL)
    assert once is not None
    assert thrice is not None
    assert thrice.low == pytest.approx(once.low)
    assert thrice.high == pytest.approx(once.high)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.sampled_from("abcdef")), min_size=1, max_size=30), st.randoms())
def test_the_order_of_forecasts_changes_nothing(pairs: list[tuple[float, str]], chance: random.Random) -> None:
    shuffled = pairs.copy()
    chance.shuffle(shuffled)
    straight = clustered_mean([v for v, _ in pairs], [c for _, c in pairs], SMALL)
    assert straight == clustered_mean([v for v, _ in shuffled], [c for _, c in shuffled], SMALL)
    assert straight is not None
    if straight.low is not None and straight.high is not None:
        assert min(v for v, _ in pairs) - 1e-9 <= straight.low <= straight.high <= max(v for v, _ in pairs) + 1e-9


def test_a_wider_level_gives_a_wider_interval() -> None:
    values, names = [i / 10 for i in range(10)], [str(i) for i in range(10)]
    narrow = clustered_mean(values, names, ScoreSettings(draws=500, level=0.5))
    wide = clustered_mean(values, names, ScoreSettings(draws=500, level=0.95))
    assert narrow is not None
    assert wide is not None
    assert narrow.low is not None
    assert wide.low is not None
    assert wide.low < narrow.low


def test_differences_are_second_minus_first_and_missing_partners_are_counted() -> None:
    first = [forecast("a", 0.5), forecast("b", 0.5), forecast("only-first", 0.5)]
    second = [
        forecast("a", 1.0, "n"),
        forecast("b", 0.5, "n"),
        forecast("b", 0.5, "n", rollout=1),
        forecast("x", 0.5, "n"),
    ]
    paired = paired_difference(first, second, lambda f: f.scores.brier, SMALL)
    assert (paired.pairs, paired.only_first, paired.only_second) == (2, 1, 2)
    assert paired.difference is not None
    assert paired.difference.mean == pytest.approx(-0.25)


def test_a_set_differs_from_itself_by_exactly_zero() -> None:
    same = [forecast(str(i), i / 10) for i in range(10)]
    difference = paired_difference(same, same, lambda f: f.scores.brier, SMALL).difference
    assert difference is not None
    assert (difference.mean, difference.low, difference.high) == (0.0, 0.0, 0.0)


def test_two_models_on_one_side_are_refused() -> None:
    with pytest.raises(DataError, match="stands twice"):
        paired_difference([forecast("a", 0.1), forecast("a", 0.2, "n")], [], lambda f: f.scores.brier, SMALL)
