"""Synthetic runs, laid down with the real run directory and the real ledger."""

import datetime as dt
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cluster.config import Settings
from cluster.failures import Failure
from rollout.events.event import Event
from rollout.manifest import make_manifest
from rollout.notebook import Assessment, LedgerEntry, Notebook, NotebookState
from rollout.packed import pack
from rollout.record import ForecastKey, ForecastRecord, Mode, Usage
from rollout.report import Report
from rollout.run import RunDirectory
from rollout.trajectory import Message, ShownArticle, ToolCall, ToolResult, Trajectory, Turn

START = dt.date(2025, 3, 3)
RunMaker = Callable[..., Path]


def make_event(index: int, options: Sequence[str], outcome: str, beliefs: bool = True, days: int = 5) -> Event:
    """An event that opens on START and whose market leans to the outcome more each day."""
    opened = dt.datetime.combine(START, dt.time(9), dt.UTC)
    rest = [o for o in options if o != outcome]
    market = {}
    for step in range(days):
        p = min(0.95, 0.4 + 0.1 * step)
        market[START + dt.timedelta(days=4 * step)] = {outcome: p} | dict.fromkeys(rest, (1 - p) / len(rest))
    return Event(
        id=f"event-{index}",
        source="test",
        question=f"Who leads the Veldt council after vote {index}?",
        criteria="Resolves to the option with the most seats.",
        background="An invented council.",
        options=tuple(options),
        opened=opened,
        deadline=opened + dt.timedelta(days=60),
        closed=opened + dt.timedelta(days=40),
        outcome=(outcome,),
        beliefs=market if beliefs else {},
        split="eval",
    )


def make_record(
    key: ForecastKey,
    options: Sequence[str],
    probabilities: dict[str, float] | None,
    failure: Failure | None = None,
    notebook: NotebookState | None = None,
) -> ForecastRecord:
    """A record with a report (None: an unusable one)."""
    tools = {} if key.mode == "no-tools" else {"search": 2, "scrape": 1, "python": 1}
    return ForecastRecord(
        key=key,
        options=tuple(options),
        report=Report(
            probabilities=probabilities or {},
            verdict="ok" if probabilities else "unusable",
            why="" if probabilities else "no answer tag",
            usable_strict=bool(probabilities),
            usable_lenient=True,
        ),
        failure=failure if probabilities else failure or Failure(kind="model", reason="no-answer"),
        notebook=notebook,
        usage=Usage(
            model_calls=3 if tools else 1,
            tool_calls=tools,
            tool_errors={"time-out": 1} if tools else {},
            input_tokens=5200 if tools else 900,
            cached_tokens=3000 if tools else 0,
            output_tokens=340,
            seconds=4.2,
            model_seconds=2.9,
            tool_seconds=1.1,
        ),
        prompt="prompt-hash",
    )


def make_trajectory(key: ForecastKey, options: Sequence[str], probabilities: dict[str, float] | None) -> Trajectory:
    """A search, a read, a calculation and an answer; no tools in no-tools."""
    day = key.date - dt.timedelta(days=1)
    prompt = (Message(role="system", content="Forecast."), Message(role="user", content=f"Today is {key.date}."))
    answer = f"<answer>{json.dumps(probabilities)}</answer>" if probabilities else "I cannot say."
    if key.mode == "no-tools":
        return Trajectory(turns=(Turn(messages=prompt, text=answer),))
    calls = (
        ToolCall(id="1", name="search", arguments=json.dumps({"query": f"Veldt council {key.event}", "top_k": 2})),
        ToolCall(id="2", name="scrape", arguments=json.dumps({"article_id": f"{key.event}-a"})),
        ToolCall(id="3", name="python", arguments=json.dumps({"code": "x = [0.4, 0.6]\nsum(x)"})),
    )
    listing = (
        f"[{key.event}-a] Council leans to {options[0]} | published {day} | score 0.812 | https://news.test/a\n"
        "Counting goes on, and the first wards lean one way.\n\n"
        f"[{key.event}-b] Weather in Veldt | published {day} | score 0.410 | https://news.test/b\n"
        "Rain is expected.\n"
    )
    body = f"[{key.event}-a] Council leans to {options[0]} | published {day} | https://news.test/a\n\nA long text."
    shown = ShownArticle(article_id=f"{key.event}-a", day=day)
    results = (
        ToolResult(
            call_id="1",
            name="search",
            text=listing,
            shown=(shown, ShownArticle(article_id=f"{key.event}-b", day=day)),
            seconds=0.2,
        ),
        ToolResult(call_id="2", name="scrape", text=body, shown=(shown,)),
        ToolResult(call_id="3", name="python", text="1.0\n"),
    )
    return Trajectory(
        turns=(
            Turn(
                messages=prompt,
                text="I search first.",
                reasoning="What would decide it?",
                tool_calls=calls,
                results=results,
            ),
            Turn(messages=(), text=answer),
        )
    )


def make_notebook(key: ForecastKey, probabilities: dict[str, float]) -> NotebookState:
    """A valid notebook with one entry."""
    entry = LedgerEntry(claim="The first wards lean one way.", date_observed=key.date - dt.timedelta(days=1))
    return NotebookState(
        notebook=Notebook(
            assessment=Assessment(p=probabilities, open_questions=("Who counts?",)), evidence_ledger=(entry,)
        ),
        status="valid",
    )


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """A factory of run directories: a model of some skill over synthetic events; every 7th forecast is unusable."""

    def make(
        name: str = "run",
        model: str = "student",
        skill: float = 0.3,
        events: int = 4,
        steps: int = 4,
        rollouts: int = 1,
        modes: Sequence[Mode] = ("no-tools", "memory-free", "memory-on"),
        beliefs: bool = True,
        floor: bool = True,
        unrecorded: int = 0,
        lost: int = 0,
        question: str | None = None,
        article: str | None = None,
    ) -> Path:
        random_ = random.Random(f"{name}{model}")
        path = tmp_path / name
        settings = Settings()
        known = []
        for i in range(events):
            options = ("Yes", "No") if i % 2 == 0 else ("Arvo", "Belka", "Corin")
            known.append(make_event(i, options, options[i % len(options)], beliefs, steps))
        if question is not None:
            known[0] = known[0].model_copy(update={"question": question})
        dates = [START + dt.timedelta(days=4 * s) for s in range(steps)]
        keys = [
            ForecastKey(model=model, event=e.id, date=d, mode=m, rollout=r)
            for m in modes
            for e in known
            for r in range(rollouts)
            for d in dates
        ]
        by_id = {e.id: e for e in known}
        best = {}
        for e in known:
            for step, d in enumerate(dates):
                p = min(0.97, 0.5 + 0.12 * step)
                best[e.id, d] = {o: p if o in e.outcome else (1 - p) / (len(e.options) - 1) for o in e.options}
        directory = RunDirectory(path)
        manifest = make_manifest(settings, {"events": "0" * 64, "index": "1" * 64})
        directory.create(settings, manifest, known, keys, best if floor else {})
        with directory.ledger() as ledger:
            for number, key in enumerate(keys[: len(keys) - unrecorded]):
                event = by_id[key.event]
                bonus = {"no-tools": 0.0, "memory-free": 0.12, "memory-on": 0.18}[key.mode]
                weights = {o: random_.random() + 0.2 for o in event.options}
                weights[event.outcome[0]] += (skill + bonus) * (1 + dates.index(key.date))
                total = sum(weights.values())
                probabilities = None if number % 7 == 6 else {o: w / total for o, w in weights.items()}
                notebook = make_notebook(key, probabilities) if key.mode == "memory-on" and probabilities else None
                record = make_record(key, event.options, probabilities, notebook=notebook)
                if number < lost:
                    failure = Failure(kind="infrastructure", reason="engine-lost", detail="the node went away")
                    record = record.model_copy(update={"report": None, "failure": failure})
                trajectory = make_trajectory(key, event.options, probabilities)
                if article is not None:
                    trajectory = _with_article(trajectory, article)
                ledger.commit([pack(record, trajectory)])
        return path

    return make


def _with_article(trajectory: Trajectory, text: str) -> Trajectory:
    turns = tuple(
        t.model_copy(
            update={
                "results": tuple(
                    r.model_copy(
                        update={"text": r.text.replace("A long text.", text).replace("Rain is expected.", text)}
                    )
                    for r in t.results
                )
            }
        )
        for t in trajectory.turns
    )
    return Trajectory(turns=turns)
