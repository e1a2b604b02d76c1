"""Rule-based forecasters, with their tool calls really answered."""

import asyncio
import datetime as dt
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ArticlesSettings, EventsSettings
from retrieval.article import Article
from retrieval.corpus.load import load_articles
from rollout.events.event import Belief, Event, EventPrompt
from rollout.events.kalman import Process, opening
from rollout.events.load import load_events
from rollout.events.prose import process_text
from rollout.events.world import make_world
from rollout.forecasters.market import MarketForecaster
from rollout.forecasters.reader import FILTER, ReaderForecaster
from rollout.forecasters.uniform import UniformForecaster
from rollout.model import Completion, Model, SampleRequest
from rollout.notebook import Notebook
from rollout.record import Mode
from rollout.trajectory import Message

TOOLS = ("search", "scrape", "python")
PROCESS = Process(start_mean=50, start_deviation=4, daily_step=1, survey_error=2)
TODAY = dt.date(2031, 2, 10)
Search = Callable[[str, int, dt.date], str]


def prompt(options: tuple[str, ...] = ("Vantel", "Corim"), background: str | None = None) -> EventPrompt:
    return EventPrompt(
        id="e",
        question="Who will win the Brimholt council vote?",
        criteria="",
        background=process_text(PROCESS, dt.date(2031, 1, 20)) if background is None else background,
        options=options,
        selection="single",
        deadline=dt.datetime(2031, 2, 25, 12, tzinfo=dt.UTC),
    )


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def converse(
    model: Model,
    event: EventPrompt,
    search: Search,
    date: dt.date = TODAY,
    mode: Mode = "memory-free",
    notebook: str = "",
    tools: tuple[str, ...] = TOOLS,
) -> list[Message]:
    """The whole step: every call of the model is answered in the tools' format."""
    messages = [Message(role="system", content="s"), Message(role="user", content=event.question + notebook)]
    for _ in range(10):
        request = SampleRequest(
            session="s", event=event, date=date, mode=mode, messages=tuple(messages), tools=tools, max_tokens=1000
        )
        completion: Completion = asyncio.run(model.sample(request))
        messages.append(Message(role="assistant", content=completion.text, tool_calls=completion.tool_calls))
        if not completion.tool_calls:
            return messages
        for call in completion.tool_calls:
            arguments: dict[str, Any] = json.loads(call.arguments)
            if call.name == "search":
                text = search(arguments["query"], arguments["top_k"], date)
            elif call.name == "python":
                text = run_python(arguments["code"])
            else:
                text = f"[{arguments['article_id']}] T | published 2031-02-01 | u\n\nVantel at 58.0 and Corim at 41.0 points."
            messages.append(Message(role="tool", content=text, call_id=call.id, name=call.name))
    raise AssertionError("no report after ten turns")


def shown(*texts: str) -> Search:
    hits = [f"[a{i}] T | published 2031-02-0{i} | score 0.500 | u\n{text}" for i, text in enumerate(texts, 1)]
    return lambda query, top_k, date: "\n\n".join(hits[:top_k]) or "No article matches."


def answer(text: str) -> dict[str, float]:
    match = re.search(r"<answer>(.*)</answer>$", text, re.DOTALL)
    assert match
    parsed: dict[str, float] = json.loads(match[1])
    return parsed


def called(messages: list[Message]) -> list[str]:
    return [call.name for m in messages for call in m.tool_calls]


TWO = (
    "A survey by the Oster Institute dated 2031-02-03 puts Vantel at 55.3 and Corim at 48.8 points.",
    "Rain has moved the Vantel fair.",
    "The Post surveyed the field. On 2031-02-01 it found Vantel at 51.0 and Corim at 49.5 points.",
)


def test_the_reader_reports_the_filters_probability_of_being_strongest() -> None:
    messages = converse(ReaderForecaster(1, 4, 0), prompt(), shown(*TWO))
    assert called(messages) == ["search", "python"]
    known = opening(dt.date(2031, 1, 20), 2, PROCESS)
    known = known.on(dt.date(2031, 2, 1), PROCESS).after((51.0, 49.5), 2)
    known = known.on(dt.date(2031, 2, 3), PROCESS).after((55.3, 48.8), 2)
    expected = known.on(dt.date(2031, 2, 25), PROCESS).strongest()
    assert answer(messages[-1].content)["Vantel"] == pytest.approx(expected[0], abs=0.016)
    assert messages[-2].content.strip() in messages[-1].content


@pytest.mark.parametrize("options", [("A'b", 'C"d', "É\\f"), ("One", "Two", "Three", "Four", "Five")])
def test_the_readers_answer_copies_every_label_exactly(options: tuple[str, ...]) -> None:
    numbers = ", ".join(f"{o} at {50 + i}.0" for i, o in enumerate(options))
    messages = converse(ReaderForecaster(1, 4, 0), prompt(options), shown(f"On 2031-02-02 it found {numbers} points."))
    probabilities = answer(messages[-1].content)
    assert tuple(probabilities) == options
    assert list(probabilities.values()) == sorted(probabilities.values())
    assert sum(probabilities.values()) == pytest.approx(1, abs=0.03)
    assert all(0.01 <= p <= 0.99 for p in probabilities.values())


def test_the_fixed_code_is_short_and_needs_nothing_but_the_standard_library() -> None:
    assert len(FILTER) <= 450
    code = next(
        json.loads(c.arguments)["code"]
        for m in converse(ReaderForecaster(1, 4, 0), prompt(), shown(*TWO))
        for c in m.tool_calls
        if c.name == "python"
    )
    assert re.findall(r"^from (\w+)", code, re.MULTILINE) == ["datetime", "json", "math"]
    assert "import " not in code.split("names =")[1]


@pytest.mark.parametrize(
    ("event", "search"),
    [
        (prompt(), shown()),
        (prompt(), shown("Vantel leads Corim.", "Vantel at 55.3 points.")),
        (prompt(), shown("A survey dated 2031-02-11 puts Vantel at 55.3 and Corim at 48.8 points.")),
        (prompt(background="No process here."), shown(*TWO)),
    ],
    ids=["nothing found", "not every option", "dated in the future", "no process"],
)
def test_without_usable_numbers_the_reader_says_uniform(event: EventPrompt, search: Search) -> None:
    messages = converse(ReaderForecaster(1, 4, 0), event, search)
    assert called(messages) == ["search"]
    assert answer(messages[-1].content) == {"Vantel": 0.5, "Corim": 0.5}


def test_without_tools_the_reader_answers_at_once() -> None:
    messages = converse(ReaderForecaster(2, 4, 1), prompt(("A", "B", "C")), shown(*TWO), mode="no-tools", tools=())
    assert len(messages) == 3
    assert answer(messages[-1].content) == {"A": 0.3333, "B": 0.3333, "C": 0.3333}


def test_tools_withdrawn_midway_still_end_in_an_answer() -> None:
    begun = converse(ReaderForecaster(1, 4, 0), prompt(), shown(*TWO))
    for kept in (4, 6):
        request = SampleRequest(
            session="s",
            event=prompt(),
            date=TODAY,
            mode="memory-free",
            messages=(*begun[:kept], Message(role="user", content="Report now.")),
            tools=(),
            max_tokens=1000,
        )
        completion = asyncio.run(ReaderForecaster(1, 4, 0).sample(request))
        assert completion.tool_calls == ()
        assert (answer(completion.text) == {"Vantel": 0.5, "Corim": 0.5}) == (kept == 4)


def test_a_scraped_page_counts_and_a_repeated_survey_counts_once() -> None:
    messages = converse(ReaderForecaster(2, 4, 1), prompt(), shown(*TWO))
    assert called(messages) == ["search", "search", "scrape", "python"]
    queries = [json.loads(c.arguments)["query"] for m in messages for c in m.tool_calls if c.name == "search"]
    assert queries == ["Brimholt council vote", "Brimholt council vote Vantel Corim"]
    code = next(json.loads(c.arguments)["code"] for m in messages for c in m.tool_calls if c.name == "python")
    assert code.count('\n("2031-') == 3
    assert '("2031-02-01", 58.0, 41.0)' in code


def test_the_notebook_stands_before_the_answer_agrees_with_it_and_is_read_next_time() -> None:
    first = converse(ReaderForecaster(1, 4, 0), prompt(), shown(*TWO), mode="memory-on")[-1].content
    text = re.search(r"(<belief_notebook>(.*)</belief_notebook>)\n<answer>", first, re.DOTALL)
    assert text
    notebook = Notebook.model_validate_json(text[2])
    assert notebook.assessment.p == answer(first)
    assert [(e.claim, e.supports, f"{e.date_observed}") for e in notebook.evidence_ledger] == [
        ("Vantel 55.3, Corim 48.8", ("Vantel",), "2031-02-03"),
        ("Vantel 51.0, Corim 49.5", ("Vantel",), "2031-02-01"),
    ]
    later = shown(TWO[0], "New figures, taken on 2031-02-09, have Vantel at 44.0 and Corim at 51.0 points.")
    messages = converse(ReaderForecaster(1, 4, 0), prompt(), later, mode="memory-on", notebook=text[1])
    second = Notebook.model_validate_json(messages[-1].content.split("belief_notebook>")[1].removesuffix("</"))
    assert second.evidence_ledger[:2] == notebook.evidence_ledger
    assert [e.claim for e in second.evidence_ledger[2:]] == ["Vantel 44.0, Corim 51.0"]
    assert answer(messages[-1].content)["Vantel"] < answer(first)["Vantel"]


def test_a_notebook_that_cannot_be_read_is_as_good_as_none() -> None:
    broken = "<belief_notebook>{not json</belief_notebook>"
    with_broken = converse(ReaderForecaster(1, 4, 0), prompt(), shown(*TWO), mode="memory-on", notebook=broken)
    without = converse(ReaderForecaster(1, 4, 0), prompt(), shown(*TWO), mode="memory-on")
    assert with_broken[-1] == without[-1]


@pytest.mark.parametrize(
    ("beliefs", "expected"),
    [
        ({TODAY: {"Vantel": 0.7, "Corim": 0.3}}, 0.7),
        ({TODAY - dt.timedelta(days=7): {"Vantel": 0.6, "Corim": 0.4}}, 0.6),
        ({TODAY - dt.timedelta(days=8): {"Vantel": 0.6, "Corim": 0.4}}, 0.5),
        ({TODAY + dt.timedelta(days=1): {"Vantel": 0.6, "Corim": 0.4}}, 0.5),
        ({}, 0.5),
    ],
)
def test_the_market_reports_the_day_or_up_to_a_week_before(beliefs: Mapping[dt.date, Belief], expected: float) -> None:
    messages = converse(MarketForecaster({"e": beliefs}), prompt(), shown(*TWO), mode="memory-on")
    assert called(messages) == []
    assert answer(messages[-1].content)["Vantel"] == expected
    assert "<belief_notebook>" in messages[-1].content


def test_uniform_knows_nothing() -> None:
    messages = converse(UniformForecaster(), prompt(), shown(*TWO))
    assert answer(messages[-1].content) == {"Vantel": 0.5, "Corim": 0.5}


def test_the_reader_is_near_the_floor_of_a_world(tmp_path: Path) -> None:
    make_world(tmp_path, 7, 30, 120, 6.0)
    events = load_events(EventsSettings(path=tmp_path / "events.jsonl")).records
    articles = load_articles(ArticlesSettings(path=tmp_path / "articles.jsonl")).records
    rows = [json.loads(line) for line in (tmp_path / "floor.jsonl").read_text().splitlines()]
    floor = {(row["event"], row["date"]): row["probabilities"] for row in rows}

    def newest(query: str, top_k: int, date: dt.date) -> str:
        hits: list[Article] = [a for a in articles if a.day <= date and query in a.title]
        lines = [f"[{a.id}] {a.title} | published {a.day} | score 0.500 | {a.url}\n{a.text}" for a in hits[::-1]]
        return "\n\n".join(lines[:top_k]) or "No article matches."

    def brier(probabilities: Mapping[str, float], event: Event) -> float:
        total = sum(probabilities.values())
        return sum((probabilities[o] / total - (o in event.outcome)) ** 2 for o in event.options)

    reader, best, equal = 0.0, 0.0, 0.0
    for event in events:
        date = list(event.beliefs)[-2]
        reader += brier(answer(converse(ReaderForecaster(1, 4, 0), event.prompt(), newest, date)[-1].content), event)
        best += brier(floor[event.id, f"{date}"], event)
        equal += 1 - 1 / len(event.options)
    assert best / len(events) < 0.6 * equal / len(events)
    assert reader / len(events) == pytest.approx(best / len(events), abs=0.02)
