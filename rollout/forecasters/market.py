"""The market's belief as a forecast: a reference that sees what no agent sees, and never a trainee."""

import datetime as dt
from collections.abc import Mapping

from rollout.events.event import Belief
from rollout.forecasters.answer import as_json, report, uniform
from rollout.model import Completion, SampleRequest

STALE_AFTER_DAYS = 7
"""An older belief says more about the data's gaps than about the event."""


class MarketForecaster:
    """Reports the belief of the forecast date, else the latest of the seven days before, else equal probabilities.

    `beliefs`: event id → UTC day → probability by option. Options without a price are absent from the report.
    """

    def __init__(self, beliefs: Mapping[str, Mapping[dt.date, Belief]]) -> None:
        self._beliefs = beliefs

    async def sample(self, request: SampleRequest) -> Completion:
        """The report."""
        by_day = self._beliefs.get(request.event.id, {})
        days = (request.date - dt.timedelta(days=back) for back in range(STALE_AFTER_DAYS + 1))
        belief = next((by_day[day] for day in days if by_day.get(day)), None)
        if belief is None:
            return Completion(text=report(request, "No market.", as_json(uniform(request.event.options))))
        return Completion(text=report(request, "The market's belief.", as_json(belief)))

    async def release(self, session: str) -> None:
        """Nothing is kept."""
