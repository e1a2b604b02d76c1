"""What can be known about random-walk strengths: the filter, and the probability of being strongest.

The options' strengths start normal, take independent normal steps every day, and are measured together with independent
normal errors. They therefore share one variance, and the Kalman filter over all options is one scalar gain. Pure and
deterministic: probabilities come from quadrature, not from draws.
"""

import datetime as dt

import numpy as np
from scipy.special import ndtr

from cluster.record import Record

_NODES = np.linspace(-8.0, 8.0, 161)
"""Standard deviations: for a smooth integrand that vanishes at both ends, equal steps converge faster than any power."""


class Process(Record):
    """How strengths move and are measured; all in points."""

    start_mean: float
    start_deviation: float
    """Of each strength on the opening day."""
    daily_step: float
    """Standard deviation of one day's step."""
    survey_error: float
    """Standard deviation of one published measurement of one option."""


class Strengths(Record):
    """The posterior of all strengths on one day: independent normals with equal variance."""

    day: dt.date
    means: tuple[float, ...]
    """One per option, points."""
    variance: float

    def on(self, day: dt.date, process: Process) -> "Strengths":
        """The same knowledge about a later day. Raises ValueError for an earlier one: the filter cannot go back."""
        if day < self.day:
            raise ValueError(f"strengths of {self.day} cannot be moved back to {day}; sort the measurements by day")
        gained = process.daily_step**2 * (day - self.day).days
        return Strengths(day=day, means=self.means, variance=self.variance + gained)

    def after(self, values: tuple[float, ...], error: float) -> "Strengths":
        """The knowledge after a measurement of every option on this day with this error deviation."""
        gain = self.variance / (self.variance + error**2)
        means = tuple(m + gain * (x - m) for m, x in zip(self.means, values, strict=True))
        return Strengths(day=self.day, means=means, variance=self.variance * (1 - gain))

    def strongest(self) -> tuple[float, ...]:
        """P(option is the strongest on this day), one per option, summing to one: the integral over an option's own
        density of the others' distribution functions."""
        deviation = self.variance**0.5
        weights = []
        for i, own in enumerate(self.means):
            others = [m for j, m in enumerate(self.means) if j != i]
            below = [ndtr(_NODES + (own - other) / deviation) for other in others]
            weights.append(float(np.sum(np.exp(-(_NODES**2) / 2) * np.prod(below, axis=0))))
        return tuple(w / sum(weights) for w in weights)


def opening(day: dt.date, options: int, process: Process) -> Strengths:
    """What is known on the opening day before any measurement."""
    return Strengths(day=day, means=(process.start_mean,) * options, variance=process.start_deviation**2)
