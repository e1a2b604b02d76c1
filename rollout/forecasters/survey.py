"""Numbers out of prose: surveys in what the tools showed, the process in the background, evidence in a notebook.

A survey counts only if it gives a number for every option; a text that does not is not evidence of anything here.
"""

import datetime as dt
import re
from collections.abc import Sequence

from cluster.record import Record
from rollout.events.event import EventPrompt
from rollout.notebook import LedgerEntry

_NUMBER = r"-?\d+(?:\.\d+)?"
_DATE = r"\d{4}-\d{2}-\d{2}"
_HEADER = re.compile(rf"^\[(?P<id>[^\]\s]+)\] .*\| published (?P<day>{_DATE}) \|")
"""The line above a hit's snippet and above a scraped text."""
_PROCESS = re.compile(
    rf"On (?P<start>{_DATE}) each was drawn near (?P<mean>{_NUMBER}) \(standard deviation (?P<spread>{_NUMBER})\)"
    rf".*?step \(standard deviation (?P<step>{_NUMBER})\)"
    rf".*?error \(standard deviation (?P<error>{_NUMBER})\)",
    re.DOTALL,
)


class Survey(Record):
    """One measurement of every option."""

    day: str
    """ISO day as printed."""
    values: tuple[str, ...]
    """One per option, in the event's order, as printed."""

    def entry(self, options: Sequence[str]) -> LedgerEntry:
        """The survey as evidence for the option that leads it."""
        claim = ", ".join(f"{option} {value}" for option, value in zip(options, self.values, strict=True))
        leader = max(range(len(options)), key=lambda i: float(self.values[i]))
        return LedgerEntry(claim=claim, supports=(options[leader],), date_observed=dt.date.fromisoformat(self.day))


class StatedProcess(Record):
    """The random walk as a background states it; numbers as printed, points."""

    start: str
    """ISO day of opening."""
    mean: str
    spread: str
    step: str
    error: str


def stated_process(event: EventPrompt) -> StatedProcess | None:
    """The process in the event's background, or None where it states none."""
    match = _PROCESS.search(event.background)
    return StatedProcess(**match.groupdict()) if match else None


def shown_surveys(text: str, options: Sequence[str], last_day: dt.date) -> list[Survey]:
    """The surveys in a search or scrape result, in the order shown; none that is dated after `last_day`."""
    found = []
    published = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            published = header["day"]
        elif published is not None and (survey := _survey(line, options, published)):
            found.append(survey)
    return [s for s in found if s.day <= last_day.isoformat()]


def shown_ids(text: str) -> list[str]:
    """The article ids in a search result, in the order shown."""
    return [match["id"] for line in text.splitlines() if (match := _HEADER.match(line))]


def remembered_surveys(entries: Sequence[LedgerEntry], options: Sequence[str]) -> list[Survey]:
    """The surveys among a notebook's active evidence."""
    active = [e for e in entries if e.date_observed is not None and e.status == "active"]
    return [s for e in active if (s := _survey(e.claim, options, f"{e.date_observed}"))]


def _survey(line: str, options: Sequence[str], published: str) -> Survey | None:
    values = []
    for option in options:
        match = re.search(rf"(?<!\w){re.escape(option)}(?: at)? ({_NUMBER})(?![\w%])", line)
        if match is None:
            return None
        values.append(match[1])
    dated = re.search(rf"(?<!\d){_DATE}(?!\d)", line)
    return Survey(day=_valid_day(dated[0] if dated else published, published), values=tuple(values))


def _valid_day(day: str, otherwise: str) -> str:
    try:
        return dt.date.fromisoformat(day).isoformat()
    except ValueError:
        return otherwise
