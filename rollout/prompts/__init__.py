"""What a model is told: one template a file, versioned by the hash of its bytes.

A prompt shows the question, the forecast date and the scheduled deadline. It cannot show an outcome, a market belief,
an actual close or the real today: they are not among its arguments. Texts of an event are data; template syntax in
them stays as it is.
"""

import datetime as dt
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import jinja2
from jinja2 import meta

from rollout.events.event import EventPrompt
from rollout.notebook import NotebookState, render_notebook
from rollout.record import Mode
from rollout.report import option_letter
from rollout.trajectory import Message

Scarce = Literal["", "time", "context"]
"""What may end the tools sooner than the budget of turns and calls."""
DemandReason = Literal["no-answer", "budget", "time", "context"]

_FOLDER = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER),
    undefined=jinja2.StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(
    event: EventPrompt,
    date: dt.date,
    mode: Mode,
    variant: str,
    carried: NotebookState | None,
    iterations: int,
    calls: int,
) -> tuple[Message, Message]:
    """(system, user) messages that open a step at that forecast date.

    The system message depends on mode, variant and selection alone, so that steps share its prefix. `carried` is what
    earlier dates left; dates that left no notebook since the one shown are named. `iterations` and `calls` are the budget.
    Raises jinja2.TemplateNotFound for a variant without templates.
    """
    multi = event.selection == "multi"
    system = _TEMPLATES.get_template(f"{variant}-{mode}.jinja").render(multi=multi)
    user = _TEMPLATES.get_template(f"user-{variant}.jinja").render(
        question=event.question,
        criteria=event.criteria,
        background=event.background,
        multi=multi,
        lettered=[(option_letter(i), option) for i, option in enumerate(event.options)],
        labels=[json.dumps(option, ensure_ascii=False) for option in event.options],
        deadline=event.deadline.astimezone(dt.UTC).date() if event.deadline is not None else None,
        date=date,
        tools=mode != "no-tools",
        iterations=iterations,
        calls=calls,
        notebook=render_notebook(carried.notebook) if carried is not None and carried.notebook is not None else None,
        written=carried.written if carried is not None else None,
        missed=carried.missed if carried is not None else (),
    )
    return Message(role="system", content=system.strip()), Message(role="user", content=user.strip())


def demand(mode: Mode, why: str) -> Message:
    """The message that withdraws the tools and asks for the report. `why` is a DemandReason.

    Raises ValueError for another reason.
    """
    if why not in get_args(DemandReason):
        raise ValueError(f"no demand for the reason {why!r}; known: {', '.join(get_args(DemandReason))}")
    text = _TEMPLATES.get_template("demand.jinja").render(why=why, notebook=mode == "memory-on")
    return Message(role="user", content=text.strip())


def budget_left(iterations: int, calls: int, scarce: Scarce) -> str:
    """What stands below the results of a turn's tools: what is left, and whether the next turn with tools is the last."""
    text = _TEMPLATES.get_template("budget-left.jinja").render(iterations=iterations, calls=calls, scarce=scarce)
    return text.strip()


@cache
def prompt_hash(mode: Mode, variant: str) -> str:
    """SHA-256 (16 hex digits) over the names and bytes of all templates that a step of that mode and variant can use."""
    found: dict[str, bytes] = {}
    waiting = [f"{variant}-{mode}.jinja", f"user-{variant}.jinja", "demand.jinja", "budget-left.jinja"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        source = (_FOLDER / name).read_bytes()
        found[name] = source
        waiting += [n for n in meta.find_referenced_templates(_TEMPLATES.parse(source.decode())) if n is not None]
    digest = hashlib.sha256()
    for name, source in sorted(found.items()):
        digest.update(f"{name}\0{len(source)}\0".encode() + source)
    return digest.hexdigest()[:16]
