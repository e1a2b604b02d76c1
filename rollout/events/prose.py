"""The words of a synthetic world: invented names and short, regular sentences.

Every name is given once in a world, so that a search for one event cannot mean another. A survey sentence holds its day
and one number for each option in the event's order of options, and fits a search snippet.
"""

import datetime as dt
import random
from collections.abc import Sequence

from rollout.events.kalman import Process

_ONSETS = (
    "B",
    "Br",
    "C",
    "D",
    "Dr",
    "F",
    "G",
    "Gr",
    "H",
    "J",
    "K",
    "L",
    "M",
    "N",
    "P",
    "R",
    "S",
    "St",
    "T",
    "Tr",
    "V",
    "W",
)
_MIDDLES = (
    "al",
    "an",
    "ar",
    "el",
    "en",
    "er",
    "il",
    "im",
    "in",
    "ol",
    "on",
    "or",
    "ul",
    "un",
    "ur",
    "as",
    "es",
    "is",
    "os",
)
_ENDS = (
    *(
        "by",
        "den",
        "dor",
        "field",
        "ford",
        "gate",
        "ham",
        "ka",
        "la",
        "lin",
        "low",
        "mar",
        "mere",
        "na",
        "ric",
        "stead",
    ),
    *("ta", "tel", "ton", "va", "vik", "wick", "za", "zen"),
)
CONTESTS = ("budget vote", "council vote", "design prize", "harbour race", "league final", "mayoral race")
_SURVEYS = (
    "A survey by {source} dated {day} puts {numbers} points.",
    "{source} surveyed the field. On {day} it found {numbers} points.",
    "New figures from {source}, taken on {day}, have {numbers} points.",
)
_SURVEY_TITLES = ("{name}: new survey", "Survey on the {name}", "Where the {name} stands")
_DISTRACTORS = (
    ("{a} bridge reopens", "The bridge at {a} is open again after repairs that took {n} weeks."),
    ("Rain delays {a} fair", "Heavy rain has moved the {a} fair to the next week, said {b} officials."),
    ("{a} library counts visitors", "The library of {a} counted {n} visitors, more than neighbouring {b}."),
    ("New ferry to {a}", "A ferry between {a} and {b} will run {n} times a week."),
)


class Names:
    """Invented names, each given once."""

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self._given: set[str] = set()

    def new(self) -> str:
        """A name that was not given before; longer once the short ones run out."""
        name = self._random.choice(_ONSETS) + self._random.choice(_MIDDLES) + self._random.choice(_ENDS)
        while name in self._given:
            name = self._random.choice(_ONSETS) + self._random.choice(_MIDDLES) + name.lower()
        self._given.add(name)
        return name


def question(name: str) -> str:
    """The event's question."""
    return f"Who will win the {name}?"


def criteria(name: str, close: dt.date) -> str:
    """The resolution criteria."""
    return f"The {name} goes to the option with the highest strength on {close}."


def process_text(process: Process, opened: dt.date) -> str:
    """The process as the event's background states it: enough to compute the best forecast from the surveys."""
    return (
        f"Strengths are in points. On {opened} each was drawn near {process.start_mean:g} "
        f"(standard deviation {process.start_deviation:g}). Every day each moves by an independent normal step "
        f"(standard deviation {process.daily_step:g}). Each number in a survey has a normal error "
        f"(standard deviation {process.survey_error:g})."
    )


def survey(
    source: random.Random, name: str, outlet: str, day: dt.date, options: Sequence[str], values: Sequence[float]
) -> tuple[str, str]:
    """(title, text) of a measurement: values in points, one per option, printed with one decimal."""
    numbers = [f"{option} at {value:.1f}" for option, value in zip(options, values, strict=True)]
    listed = ", ".join(numbers[:-1]) + f" and {numbers[-1]}"
    text = source.choice(_SURVEYS).format(source=f"the {outlet}", day=day, numbers=listed)
    return source.choice(_SURVEY_TITLES).format(name=name), text[0].upper() + text[1:]


def decision(name: str, winner: str, day: dt.date) -> tuple[str, str]:
    """(title, text) of the page that states the outcome."""
    return f"{name} decided", f"{winner} has won the {name}, officials said on {day}."


def distractor(source: random.Random, places: Sequence[str]) -> tuple[str, str]:
    """(title, text) of a page that belongs to no event."""
    title, text = source.choice(_DISTRACTORS)
    a, b = source.sample(places, 2)
    n = source.randint(2, 400)
    return title.format(a=a, b=b, n=n), text.format(a=a, b=b, n=n)


def sibling(name: str, winner: str) -> str:
    """A sentence that gives another event's answer away."""
    return f" Note: the {name} went to {winner}."
