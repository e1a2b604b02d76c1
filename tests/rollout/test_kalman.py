"""The filter and the probability of being strongest against closed forms."""

import datetime as dt
from math import erf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.events.kalman import Process, Strengths, opening

DAY = dt.date(2030, 1, 1)
PROCESS = Process(start_mean=50, start_deviation=4, daily_step=1, survey_error=2)


def test_one_survey_is_weighed_by_precision() -> None:
    known = opening(DAY, 2, PROCESS).on(DAY + dt.timedelta(days=4), PROCESS).after((60.0, 50.0), 2)
    # Variance 16 + 4 = 20, gain 20 / 24.
    assert known.means == pytest.approx((50 + 10 * 20 / 24, 50))
    assert known.variance == pytest.approx(20 * 4 / 24)


def test_the_filter_equals_the_joint_normal_posterior() -> None:
    days, values = np.array([0, 3, 3, 9]), np.array([52.0, 49.0, 55.5, 47.0])
    prior = 16 + np.minimum.outer(days, days)
    to_end = 16 + np.minimum(days, 12)
    gain = to_end @ np.linalg.inv(prior + 4 * np.eye(4))
    known = opening(DAY, 1, PROCESS)
    for day, value in zip(days, values, strict=True):
        known = known.on(DAY + dt.timedelta(days=int(day)), PROCESS).after((float(value),), 2)
    known = known.on(DAY + dt.timedelta(days=12), PROCESS)
    assert known.means[0] == pytest.approx(50 + gain @ (values - 50))
    assert known.variance == pytest.approx(16 + 12 - gain @ to_end)


@given(st.floats(-30, 30), st.floats(0.5, 50))
def test_two_options_agree_with_the_normal_distribution_function(difference: float, variance: float) -> None:
    found = Strengths(day=DAY, means=(50 + difference, 50), variance=variance).strongest()
    z = difference / sqrt(2 * variance)
    assert found[0] == pytest.approx((1 + erf(z / sqrt(2))) / 2, abs=1e-9)
    assert sum(found) == pytest.approx(1)


def test_equal_options_are_equally_likely_and_a_better_one_is_likelier() -> None:
    assert Strengths(day=DAY, means=(50,) * 5, variance=9).strongest() == pytest.approx((0.2,) * 5)
    p = Strengths(day=DAY, means=(50, 51, 49), variance=9).strongest()
    assert p[1] > p[0] > p[2]


def test_the_filter_does_not_go_back_in_time() -> None:
    with pytest.raises(ValueError, match="sort"):
        opening(DAY, 2, PROCESS).on(DAY - dt.timedelta(days=1), PROCESS)
