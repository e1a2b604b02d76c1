"""One episode as a reader sees it: what was searched, read, computed and answered at each date, and who knew better.

Built from the ledger alone. Long texts are cut to a stated length; nothing is left out without a count.
"""

import datetime as dt
import json
import re
from collections.abc import Sequence

from cluster.record import Record
from eval.scoring import ScoredForecast
from rollout.events.event import Belief, Event
from rollout.notebook import NotebookState
from rollout.record import ForecastRecord
from rollout.trajectory import ToolCall, ToolResult, Trajectory, Turn

ARTICLE_CHARACTERS = 1_500
OUTPUT_CHARACTERS = 4_000
TEXT_CHARACTERS = 6_000

_HIT = re.compile(
    r"^\[(?P<id>[^\]]*)\] (?P<title>.*) \| published (?P<day>\d{4}-\d{2}-\d{2}) \| score (?P<score>-?[\d.]+) \| (?P<url>.*)$"
)
_ARTICLE = re.compile(r"^\[(?P<id>[^\]]*)\] (?P<title>.*) \| published (?P<day>\d{4}-\d{2}-\d{2}) \| (?P<url>.*)$")


class Excerpt(Record):
    """A text and how much of it was left out here."""

    text: str
    left_out: int
    """Characters."""


class ArticleLine(Record):
    """An article of which something was shown."""

    id: str
    title: str
    url: str
    day: dt.date
    after_cutoff: bool
    """A breach of the boundary: it was published after the step's cutoff."""
    score: str = ""
    snippet: str = ""


class Action(Record):
    """One tool call and what it returned."""

    tool: str
    subject: str
    """The query, the article's id, or the raw arguments where they have neither."""
    code: Excerpt | None
    """python only."""
    error: str
    articles: tuple[ArticleLine, ...]
    output: Excerpt | None
    """What the model was shown, where it is not the listed articles."""
    cut_for_model: int
    """Characters that the model was not shown either."""


class TurnView(Record):
    """One model call."""

    told: Excerpt | None
    """What the user message said (first turn: the question; later: a demand)."""
    reasoning: Excerpt | None
    text: Excerpt | None
    actions: tuple[Action, ...]
    malformed: tuple[str, ...]


class OptionView(Record):
    """One label of the answer beside what others believed."""

    label: str
    realized: bool
    offered: bool
    model: float
    market: float | None
    floor: float | None


class StepView(Record):
    """One forecast date."""

    record: ForecastRecord
    scored: ScoredForecast | None
    """None where the forecast was lost to the run, or the event has several answers."""
    cutoff: dt.date
    options: tuple[OptionView, ...]
    turns: tuple[TurnView, ...]
    notebook: NotebookState | None
    has_trajectory: bool

    @property
    def articles(self) -> tuple[ArticleLine, ...]:
        """Everything shown, in order."""
        return tuple(a for turn in self.turns for action in turn.actions for a in action.articles)


def step_view(
    record: ForecastRecord, scored: ScoredForecast | None, trajectory: Trajectory | None, lag_days: int
) -> StepView:
    """One date. `lag_days` is the run's cutoff lag: χ = τ - lag."""
    cutoff = record.key.date - dt.timedelta(days=lag_days)
    return StepView(
        record=record,
        scored=scored,
        cutoff=cutoff,
        options=_options(scored),
        turns=tuple(_turn(t, cutoff) for t in trajectory.turns) if trajectory else (),
        notebook=record.notebook,
        has_trajectory=trajectory is not None,
    )


def market_line(event: Event) -> tuple[tuple[dt.date, float], ...]:
    """The market's probability of the outcome on every day that has one."""
    outcome = event.outcome[0]
    return tuple((day, belief[outcome]) for day, belief in sorted(event.beliefs.items()) if outcome in belief)


def excerpt(text: str, characters: int) -> Excerpt | None:
    """The beginning of a text; None for an empty one."""
    stripped = text.strip()
    if not stripped:
        return None
    return Excerpt(text=stripped[:characters], left_out=max(0, len(stripped) - characters))


def _options(scored: ScoredForecast | None) -> tuple[OptionView, ...]:
    if scored is None:
        return ()
    unoffered = [label for label in scored.probabilities if label not in scored.options]
    market: Belief = scored.market or {}
    if scored.market is None and scored.market_probability is not None:
        market = {scored.outcome: scored.market_probability}
    floor: Belief = scored.floor or {}
    return tuple(
        OptionView(
            label=label,
            realized=label == scored.outcome,
            offered=label in scored.options,
            model=scored.probabilities.get(label, 0.0),
            market=market.get(label),
            floor=floor.get(label),
        )
        for label in (*scored.options, *unoffered)
    )


def _turn(turn: Turn, cutoff: dt.date) -> TurnView:
    results = {r.call_id: r for r in turn.results}
    told = "\n\n".join(m.content for m in turn.messages if m.role == "user")
    return TurnView(
        told=excerpt(told, TEXT_CHARACTERS),
        reasoning=excerpt(turn.reasoning, TEXT_CHARACTERS),
        text=excerpt(turn.text, TEXT_CHARACTERS),
        actions=tuple(_action(call, results.get(call.id), cutoff) for call in turn.tool_calls),
        malformed=tuple(f"{call.kind}: {call.reason}" for call in turn.malformed_calls),
    )


def _action(call: ToolCall, result: ToolResult | None, cutoff: dt.date) -> Action:
    arguments = _arguments(call.arguments)
    code = arguments.get("code", "") if call.name == "python" else ""
    subject = next((arguments[k] for k in ("query", "article_id") if k in arguments), "")
    if not subject and not code:
        subject = call.arguments[:OUTPUT_CHARACTERS]
    shown = result.text if result is not None else ""
    articles, rest = _articles(result, cutoff) if result is not None else ((), "")
    return Action(
        tool=call.name,
        subject=subject,
        code=excerpt(code, OUTPUT_CHARACTERS),
        error=result.error if result is not None else "no result recorded",
        articles=articles,
        output=excerpt(rest if articles else shown, ARTICLE_CHARACTERS if articles else OUTPUT_CHARACTERS),
        cut_for_model=result.cut_characters if result is not None else 0,
    )


def _arguments(raw: str) -> dict[str, str]:
    """The arguments that are texts; anything else that a model wrote is shown raw."""
    try:
        loaded = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return {k: v for k, v in loaded.items() if isinstance(v, str)} if isinstance(loaded, dict) else {}


def _articles(result: ToolResult, cutoff: dt.date) -> tuple[tuple[ArticleLine, ...], str]:
    """The shown articles, and what of the text they do not cover.

    Days come from the recorded `shown`, not from the text: titles and texts are other people's words.
    """
    described = _described(result)
    lines = tuple(
        ArticleLine(
            id=shown.article_id,
            day=shown.day,
            after_cutoff=shown.day > cutoff,
            title=described.get(shown.article_id, {}).get("title", ""),
            url=described.get(shown.article_id, {}).get("url", ""),
            score=described.get(shown.article_id, {}).get("score", ""),
            snippet=described.get(shown.article_id, {}).get("snippet", ""),
        )
        for shown in result.shown
    )
    if any(line.id not in described for line in lines):
        return lines, result.text
    return lines, result.text.partition("\n\n")[2] if result.name == "scrape" else ""


def _described(result: ToolResult) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    if result.name == "search":
        rows = result.text.split("\n")
        for row, following in zip(rows, (*rows[1:], ""), strict=True):
            if (match := _HIT.match(row)) is not None:
                found.setdefault(match["id"], {**match.groupdict(), "snippet": following})
    elif (match := _ARTICLE.match(result.text.split("\n", 1)[0])) is not None:
        found[match["id"]] = match.groupdict()
    return found


def breaches(steps: Sequence[StepView]) -> tuple[int, int]:
    """(articles shown, of which published after their step's cutoff)."""
    articles = [a for step in steps for a in step.articles]
    return len(articles), sum(a.after_cutoff for a in articles)
