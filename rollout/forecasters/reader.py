"""The reader: searches, reads the surveys, lets the `python` tool compute, answers what the tool printed.

It is the best public forecaster of a synthetic world as far as its searches reach, and the demo's teacher: whatever a small
student has to reproduce is text to copy, never arithmetic. On other events it finds no numbers and reports equal
probabilities. Every completion is a function of the request alone.
"""

import json
import re

from pydantic import ValidationError

from rollout.events.event import EventPrompt
from rollout.forecasters.answer import as_json, report, uniform
from rollout.forecasters.survey import (
    StatedProcess,
    Survey,
    remembered_surveys,
    shown_ids,
    shown_surveys,
    stated_process,
)
from rollout.model import Completion, SampleRequest
from rollout.notebook import LedgerEntry, Notebook
from rollout.trajectory import Message, ToolCall

FILTER = """\
day = date.fromisoformat
t, v, m = day(min(polls)[0]), {spread}**2, [{mean} for o in names]
for d, *x in sorted(polls):
    v += {step}**2 * (day(d) - t).days
    t, k = day(d), v / (v + {error}**2)
    m, v = [a + k * (b - a) for a, b in zip(m, x)], v - k * v
s = (v + {step}**2 * (day("{end}") - t).days)**.5
w = [exp(1.2 * (a - max(m)) / s) for a in m]
print(dumps({{o: round(.98 * q / sum(w) + .02 / len(w), 2) for o, q in zip(names, w)}}))
"""
"""The Kalman filter of independent random walks that are measured together (one variance v for all), moved to the end, then
P(strongest) as exp(1.2 m / s), normalized: the logistic approximation of the normal distribution function. The prior
stands at the first survey instead of the opening, so that a small student has nothing to copy that a compact prompt does
not show (the number of options is counted by the code for the same reason), and 2% go to all options alike, so that
rounding never gives 0."""

_NOTEBOOK = re.compile(r"<belief_notebook>(.*?)</belief_notebook>", re.DOTALL)
_PRINTED = re.compile(r"^\{.*\}$", re.MULTILINE)
_QUESTION = re.compile(
    r"^(?:who|what|which|when|will|does|do|is|are|how)\b(?: will| is| are)?(?: win| be)?(?: the)? ", re.I
)
_QUERY_CHARACTERS = 120


class ReaderForecaster:
    """Makes `searches` searches of `top_k` hits, opens `scrapes` of them, computes once, answers."""

    def __init__(self, searches: int, top_k: int, scrapes: int) -> None:
        self._searches, self._top_k, self._scrapes = searches, top_k, scrapes

    async def sample(self, request: SampleRequest) -> Completion:
        """The next call, or the report once there is nothing left to call or no tool is offered."""
        made = [call for message in request.messages for call in message.tool_calls]
        count = {name: sum(call.name == name for call in made) for name in ("search", "scrape", "python")}
        entries = _carried(request.messages)
        surveys = _surveys(request, entries)
        process = stated_process(request.event)
        if "search" in request.tools and count["search"] < self._searches:
            query = _query(request.event, count["search"])
            return _calls(len(made), "search", {"query": query, "top_k": self._top_k})
        if "scrape" in request.tools and count["scrape"] < self._scrapes:
            ids = [i for m in request.messages if m.role == "tool" and m.name == "search" for i in shown_ids(m.content)]
            unopened = list(dict.fromkeys(ids))[count["scrape"] :]
            if unopened:
                return _calls(len(made), "scrape", {"article_id": unopened[0]})
        if "python" in request.tools and count["python"] == 0 and surveys and process and request.event.deadline:
            return _calls(len(made), "python", {"code": cell(request.event, process, surveys)})
        return Completion(text=_report(request, entries, surveys))

    async def release(self, session: str) -> None:
        """Nothing is kept."""


def cell(event: EventPrompt, process: StatedProcess, surveys: list[Survey]) -> str:
    """The code that prints the answer: what was read, typed in, and the fixed filter. Raises ValueError without a deadline."""
    if event.deadline is None:
        raise ValueError(f"event {event.id} has no deadline; the filter needs the day it runs to")
    polls = ",\n".join(f'("{s.day}", {", ".join(s.values)})' for s in surveys)
    return (
        "from datetime import date\nfrom json import dumps\nfrom math import exp\n"
        f"names = {json.dumps(event.options, ensure_ascii=False)}\n"
        f"polls = [\n{polls}]\n" + FILTER.format(**process.model_dump(), end=event.deadline.date())
    )


def _query(event: EventPrompt, number: int) -> str:
    """What the question asks about; from the second search on, with the options' names."""
    subject = _QUESTION.sub("", event.question).rstrip("? ")
    if number:
        subject = f"{subject} {' '.join(event.options[number - 1 :] + event.options[: number - 1])}"
    return subject[:_QUERY_CHARACTERS].strip()


def _carried(messages: tuple[Message, ...]) -> tuple[LedgerEntry, ...]:
    """The evidence of the notebook that the prompt carries, if it carries one that can be read."""
    for message in messages:
        if message.role != "user":
            continue
        for text in _NOTEBOOK.findall(message.content):
            try:
                return Notebook.model_validate_json(text).evidence_ledger
            except ValidationError:
                continue
    return ()


def _surveys(request: SampleRequest, entries: tuple[LedgerEntry, ...]) -> list[Survey]:
    """Remembered and shown surveys, each once, in the order met."""
    options = request.event.options
    found = remembered_surveys(entries, options)
    for message in request.messages:
        if message.role == "tool" and message.name in ("search", "scrape"):
            found += shown_surveys(message.content, options, request.date)
    return list(dict.fromkeys(found))


def _report(request: SampleRequest, entries: tuple[LedgerEntry, ...], surveys: list[Survey]) -> str:
    options = request.event.options
    known = remembered_surveys(entries, options)
    evidence = [*entries, *(s.entry(options) for s in surveys if s not in known)]
    printed = [
        found[-1]
        for m in request.messages
        if m.role == "tool" and m.name == "python" and (found := _PRINTED.findall(m.content))
    ]
    if printed:
        return report(request, "The filter gives:", printed[-1], evidence)
    return report(request, "No numbers to compute with.", as_json(uniform(options)), evidence)


def _calls(made: int, name: str, arguments: dict[str, str | int]) -> Completion:
    call = ToolCall(id=f"call_{made + 1}", name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    return Completion(tool_calls=(call,))
