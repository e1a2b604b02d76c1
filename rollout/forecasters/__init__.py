"""Rule-based forecasters: baselines on any events, and the teacher of the demo."""

from rollout.forecasters.market import MarketForecaster
from rollout.forecasters.reader import ReaderForecaster
from rollout.forecasters.uniform import UniformForecaster

__all__ = ["MarketForecaster", "ReaderForecaster", "UniformForecaster"]
