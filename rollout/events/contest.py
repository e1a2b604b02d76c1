"""One event of a synthetic world in the making: its path of strengths, its surveys, and what they allow to know.

The path and the market draw from sources of the event's own, so that nothing else in the world changes them.
"""

import datetime as dt
import random

from rollout.events import prose
from rollout.events.event import Event
from rollout.events.kalman import Process, opening

FIRST_DAY = dt.date(2030, 1, 1)
PROCESS = Process(start_mean=50, start_deviation=4, daily_step=1, survey_error=2)
PRIVATE_ERROR = 3.0
"""Points; the market's own daily measurement of each option."""
OPTION_COUNTS = {2: 0.5, 3: 0.25, 4: 0.15, 5: 0.1}
"""Share of events by number of options: two are the most frequent, so that small models meet them often."""


def day_of(number: int) -> dt.date:
    """The date of a day number of the world, from 0."""
    return FIRST_DAY + dt.timedelta(days=number)


def instant(number: int, minute: int) -> dt.datetime:
    """A UTC time: minutes after the beginning of a day number."""
    return dt.datetime.combine(day_of(number), dt.time(), dt.UTC) + dt.timedelta(minutes=minute)


class Contest:
    """One event in the making. Days are numbers from FIRST_DAY, values are points."""

    def __init__(self, seed: str, label: str, life: tuple[int, int], names: prose.Names) -> None:
        """`seed` names the sources that this event alone draws from; `life` is its opening and its closing day."""
        source = random.Random(f"{seed}/path")
        self._market_seed = f"{seed}/market"
        self.id = label
        self.opened, self.closed = life
        self.name = f"{names.new()} {source.choice(prose.CONTESTS)}"
        count = source.choices(list(OPTION_COUNTS), list(OPTION_COUNTS.values()))[0]
        self.options = tuple(names.new() for _ in range(count))
        level = [source.gauss(PROCESS.start_mean, PROCESS.start_deviation) for _ in self.options]
        self.path = {self.opened: tuple(level)}
        """Strengths by day number."""
        for day in range(self.opened + 1, self.closed + 1):
            level = [x + source.gauss(0, PROCESS.daily_step) for x in level]
            self.path[day] = tuple(level)
        self.winner = self.options[max(range(count), key=lambda k: self.path[self.closed][k])]
        self.surveys: dict[int, tuple[float, ...]] = {}
        """The day's published values, one per option, by day number; at most one survey a day."""

    def measure(self, day: int, source: random.Random) -> tuple[float, ...]:
        """Takes and keeps the day's survey: a value for each option, with one decimal as it will be printed."""
        values = tuple(round(x + source.gauss(0, PROCESS.survey_error), 1) for x in self.path[day])
        self.surveys[day] = values
        return values

    def silence(self, day: int) -> int:
        """Days since the last survey, or since the opening."""
        return day - max(self.surveys, default=self.opened - 1)

    def floor(self) -> dict[int, tuple[float, ...]]:
        """P(strongest at close) by day number, from opening to close, given everything published by that day."""
        return self._forecasts(None)

    def market(self) -> dict[int, tuple[float, ...]]:
        """The same for someone who also measures privately every day, from opening to the day before the close."""
        forecasts = self._forecasts(random.Random(self._market_seed))
        del forecasts[self.closed]
        return forecasts

    def _forecasts(self, private: random.Random | None) -> dict[int, tuple[float, ...]]:
        known = opening(day_of(self.opened), len(self.options), PROCESS)
        forecasts = {}
        for day in range(self.opened, self.closed + 1):
            known = known.on(day_of(day), PROCESS)
            if day in self.surveys:
                known = known.after(self.surveys[day], PROCESS.survey_error)
            if private is not None:
                signal = tuple(x + private.gauss(0, PRIVATE_ERROR) for x in self.path[day])
                known = known.after(signal, PRIVATE_ERROR)
            forecasts[day] = known.on(day_of(self.closed), PROCESS).strongest()
        return forecasts

    def event(self, background: str) -> Event:
        """The finished event with this background text."""
        return Event(
            id=self.id,
            source="synthetic",
            url=f"https://world.example/{self.id}",
            question=prose.question(self.name),
            criteria=prose.criteria(self.name, day_of(self.closed)),
            background=background,
            options=self.options,
            opened=instant(self.opened, 0),
            deadline=instant(self.closed, 12 * 60),
            closed=instant(self.closed, 12 * 60),
            outcome=(self.winner,),
            beliefs={
                day_of(day): {o: round(p, 4) for o, p in zip(self.options, ps, strict=True)}
                for day, ps in self.market().items()
            },
        )
