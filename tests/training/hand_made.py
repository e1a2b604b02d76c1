"""Events, trajectories and records made by hand."""

import datetime as dt

from rollout.events.event import Event
from rollout.record import ForecastKey, ForecastRecord
from rollout.report import Report
from rollout.trajectory import Message, ToolCall, ToolResult, Trajectory, Turn

DAY = dt.date(2031, 5, 4)


def event(name: str, split: str | None = "train", outcome: str = "Yes") -> Event:
    return Event(
        id=name,
        source="test",
        question=f"Will {name} happen?",
        options=("Yes", "No"),
        opened=dt.datetime(2031, 5, 1, tzinfo=dt.UTC),
        closed=dt.datetime(2031, 6, 1, tzinfo=dt.UTC),
        outcome=(outcome,),
        split=split,
    )


def taught(name: str, padding: str = "") -> Trajectory:
    """A rule-based forecaster's step: a search, then the report."""
    call = ToolCall(id="0", name="search", arguments='{"query": "poll"}')
    shown = f"[a-1] Poll | published 2031-05-03 | score 0.500 | \nYes leads.{padding}"
    return Trajectory(
        turns=(
            Turn(
                messages=(
                    Message(role="system", content="You forecast."),
                    Message(role="user", content=f"Will {name} happen?"),
                ),
                tools=("search", "scrape", "python"),
                text="",
                tool_calls=(call,),
                results=(ToolResult(call_id="0", name="search", text=shown),),
            ),
            Turn(
                messages=(Message(role="tool", content=shown, call_id="0", name="search"),),
                tools=("search", "scrape", "python"),
                text='<answer>{"Yes": 0.8, "No": 0.2}</answer>',
            ),
        )
    )


def key(name: str, rollout: int = 0, mode: str = "memory-free", day: dt.date = DAY) -> ForecastKey:
    return ForecastKey(model="reader", event=name, date=day, mode=mode, rollout=rollout)


def forecast(of: ForecastKey, yes: float = 0.8, **changes: object) -> ForecastRecord:
    report = Report(probabilities={"Yes": yes, "No": 1 - yes}, verdict="ok", usable_strict=True, usable_lenient=True)
    return ForecastRecord(**{"key": of, "options": ("Yes", "No"), "report": report, "prompt": "p", **changes})


Finished = tuple[ForecastRecord, Trajectory | None]
