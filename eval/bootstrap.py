"""Event-clustered bootstrap: percentile intervals of a mean, and paired differences of two sets of forecasts.

Forecasts of one event share its outcome, so events are resampled with everything that was forecast about them. The same
settings and values give the same interval, in whatever order the values come.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config import ScoreSettings
from cluster.failures import DataError
from cluster.record import Record
from eval.scoring import ScoredForecast
from rollout.record import ForecastKey

_CELLS = 4_000_000
"""Draws × events held at once: bounds the memory, not the result."""


class Interval(Record):
    """A mean with its percentile interval."""

    mean: float
    low: float | None
    """None with fewer than two events: one cluster says nothing about spread."""
    high: float | None
    n: int
    """Values."""
    events: int
    """Clusters."""


class PairedDifference(Record):
    """Mean of second minus first over the forecasts that both have; what has no partner is counted."""

    difference: Interval | None
    """None without a pair."""
    pairs: int
    only_first: int
    only_second: int


PairKey = tuple[str, str, str, int]
"""(event, date, mode, rollout): the key without its model."""


def clustered_mean(values: Sequence[float], clusters: Sequence[str], settings: ScoreSettings) -> Interval | None:
    """Mean of `values` (one per forecast) and its interval over resampled `clusters` (event ids, aligned with it).

    None for no values. Raises ValueError if the two are not aligned.
    """
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} values but {len(clusters)} cluster names")
    if not values:
        return None
    data = np.asarray(values, dtype=np.float64)
    names, member = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    # Sorted within the cluster: floating-point sums must not depend on the order of the ledger.
    order = np.lexsort((data, member))
    sums = np.asarray(np.bincount(member[order], weights=data[order]), dtype=np.float64)
    sizes = np.bincount(member)
    mean = float(sums.sum() / sizes.sum())
    if len(names) < 2:
        return Interval(mean=mean, low=None, high=None, n=len(values), events=len(names))
    means = _resampled_means(sums, sizes, settings)
    tail = (1.0 - settings.level) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(mean=mean, low=float(low), high=float(high), n=len(values), events=len(names))


def paired_difference(
    first: Sequence[ScoredForecast],
    second: Sequence[ScoredForecast],
    value: Callable[[ScoredForecast], float | None],
    settings: ScoreSettings,
) -> PairedDifference:
    """Second minus first, matched by (event, date, mode, rollout) and clustered by event.

    A forecast for which `value` is None counts as absent. Raises DataError if one side holds a key twice.
    """
    left, right = _by_pair(first, value), _by_pair(second, value)
    shared = sorted(left.keys() & right.keys())
    return PairedDifference(
        difference=clustered_mean([right[k] - left[k] for k in shared], [event for event, *_ in shared], settings),
        pairs=len(shared),
        only_first=len(left) - len(shared),
        only_second=len(right) - len(shared),
    )


def pair_key(key: ForecastKey) -> PairKey:
    """What two models' forecasts must share to be compared."""
    return key.event, key.date.isoformat(), key.mode, key.rollout


def _by_pair(
    forecasts: Sequence[ScoredForecast], value: Callable[[ScoredForecast], float | None]
) -> dict[PairKey, float]:
    found: dict[PairKey, float] = {}
    for forecast in forecasts:
        number = value(forecast)
        if number is None:
            continue
        key = pair_key(forecast.key)
        if key in found:
            raise DataError(f"forecast {key} stands twice on one side of a comparison; compare one model at a time")
        found[key] = number
    return found


def _resampled_means(
    sums: NDArray[np.float64], sizes: NDArray[np.intp], settings: ScoreSettings
) -> NDArray[np.float64]:
    count = len(sums)
    generator = np.random.default_rng(settings.seed)
    rows = max(1, _CELLS // count)
    blocks = []
    for start in range(0, settings.draws, rows):
        drawn = generator.integers(0, count, size=(min(rows, settings.draws - start), count))
        blocks.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(blocks)
