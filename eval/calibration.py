"""Calibration: how often what was given probability p came true, over every offered option of every usable forecast.

Fallback forecasts are left out: a uniform distribution that the model never reported says nothing of its calibration.
"""

from collections.abc import Sequence

import numpy as np

from cluster.record import Record
from eval.scoring import ScoredForecast

BINS = 10


class CalibrationBin(Record):
    """One equal-width bin [low, high); the last one is closed."""

    low: float
    high: float
    n: int
    """Option probabilities in the bin."""
    mean_probability: float | None
    """None when empty."""
    frequency: float | None
    """Share of those options that were realized; None when empty."""


class Calibration(Record):
    """A reliability table and its expected calibration error."""

    bins: tuple[CalibrationBin, ...]
    ece: float | None
    """Σ n_b/N · |frequency - mean probability|, in [0, 1]; None without a usable forecast."""
    n: int
    """Option probabilities in all bins."""


def calibration(forecasts: Sequence[ScoredForecast], bins: int = BINS) -> Calibration:
    """The table over all option probabilities of the usable forecasts."""
    usable = [f for f in forecasts if f.usable]
    probabilities = np.array([f.probabilities.get(o, 0.0) for f in usable for o in f.options])
    realized = np.array([o == f.outcome for f in usable for o in f.options], dtype=float)
    where = np.minimum((probabilities * bins).astype(int), bins - 1)
    table = []
    error = 0.0
    for index in range(bins):
        inside = where == index
        n = int(inside.sum())
        mean = float(probabilities[inside].mean()) if n else None
        frequency = float(realized[inside].mean()) if n else None
        if mean is not None and frequency is not None:
            error += n * abs(frequency - mean)
        table.append(
            CalibrationBin(low=index / bins, high=(index + 1) / bins, n=n, mean_probability=mean, frequency=frequency)
        )
    total = len(probabilities)
    return Calibration(bins=tuple(table), ece=error / total if total else None, n=total)
