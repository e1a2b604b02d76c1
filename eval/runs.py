"""A run with every record scored: what all summaries, comparisons and pages start from.

It is read from the ledger alone, at any time, also while the run goes on.
"""

import datetime as dt
from collections.abc import Iterable
from pathlib import Path

from cluster.config import Settings
from cluster.failures import DataError
from cluster.record import Record
from eval.discrete import ScoredAnswer, score_answer
from eval.scoring import ScoredForecast, score_forecast
from rollout.events.event import Event
from rollout.manifest import Manifest
from rollout.record import MODES, ForecastKey, ForecastRecord, Mode
from rollout.run import RunDirectory

Condition = tuple[str, Mode]
"""(model, mode): what a row of a summary is about."""


class ScoredRun(Record):
    """Everything of one run that scores need; trajectories stay in the ledger."""

    path: Path
    settings: Settings
    manifest: Manifest
    events: dict[str, Event]
    scheduled: tuple[ForecastKey, ...]
    records: tuple[ForecastRecord, ...]
    """In scheduled order."""
    forecasts: tuple[ScoredForecast, ...]
    """Of single-answer events, in scheduled order; forecasts lost to the run are absent."""
    answers: tuple[ScoredAnswer, ...]
    """Of multi-answer events, likewise."""

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    def conditions(self) -> list[Condition]:
        """The (model, mode) pairs that were scheduled: models in scheduled order, modes from no tools to memory."""
        models = list(dict.fromkeys(k.model for k in self.scheduled))
        present = {(k.model, k.mode) for k in self.scheduled}
        return [(model, mode) for model in models for mode in MODES if (model, mode) in present]

    def dates(self) -> dict[str, tuple[dt.date, ...]]:
        """Scheduled forecast dates by event, in order."""
        return forecast_dates(self.scheduled)


def load_run(path: Path) -> ScoredRun:
    """Read and score one run. Raises DataError if it is no run, or if its ledger and events do not belong together."""
    directory = RunDirectory(path)
    events = directory.events()
    floor = directory.floor()
    with directory.ledger() as ledger:
        # Records first: whatever is recorded later in a running run is missing here, never unscheduled.
        records = tuple(ledger.records())
        scheduled = tuple(ledger.scheduled())
    forecasts, answers = [], []
    for record in records:
        event = events.get(record.key.event)
        if event is None:
            raise DataError(
                f"{path}: forecast {record.key} is about event {record.key.event!r}, which is not in events.jsonl"
            )
        if event.selection == "multi":
            if (answer := score_answer(record, event)) is not None:
                answers.append(answer)
        elif (scored := score_forecast(record, event, floor.get((event.id, record.key.date)))) is not None:
            forecasts.append(scored)
    return ScoredRun(
        path=path,
        settings=directory.settings(),
        manifest=directory.manifest(),
        events=events,
        scheduled=scheduled,
        records=records,
        forecasts=tuple(forecasts),
        answers=tuple(answers),
    )


def forecast_dates(keys: Iterable[ForecastKey]) -> dict[str, tuple[dt.date, ...]]:
    """The distinct dates of each event, in order."""
    dates: dict[str, set[dt.date]] = {}
    for key in keys:
        dates.setdefault(key.event, set()).add(key.date)
    return {event: tuple(sorted(days)) for event, days in dates.items()}
