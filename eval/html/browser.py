"""The event browser: which events and episodes the page lists, in which order, and which of them it holds in full.

Lists are complete up to `EVENTS`; full episodes are bounded by number and bytes, and what stays out is counted. Events
alternate between the worst and the best mean Brier, so that any cut keeps both ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from cluster.record import Record
from eval.html.charts import DatedLine, probability_plot
from eval.html.episodes import StepView, breaches, market_line, step_view
from eval.html.figures import Figure, mode_style
from eval.runs import ScoredRun
from eval.scoring import ScoredForecast, brier, is_usable
from rollout.events.event import Event
from rollout.record import ForecastKey, ForecastRecord, Mode
from rollout.run import RunDirectory

EVENTS = 1_000
"""Events in the browser."""
CHARTS = 12
"""Models charted on an event's page."""
CURVES = 12
"""Forecast curves in one chart; more cannot be told apart."""

EventKey = tuple[str, str, str]
"""(id, question, outcome): two runs may use one id for different events."""


class EpisodeEntry(Record):
    """One episode in the lists; `anchor` is empty where its page is not in the file."""

    run: str
    model: str
    mode: Mode
    rollout: int
    anchor: str
    dates: int
    """Recorded forecasts."""
    usable: int
    brier: float | None
    """Mean over its scored forecasts."""


@dataclass(frozen=True)
class EventEntry:
    """One row of the event browser and its page."""

    anchor: str
    event: Event
    forecasts: int
    """Scored."""
    dates: int
    brier: float | None
    market: float | None
    """Mean Brier of the market over the forecasts it covers."""
    floor: float | None
    charts: tuple[Figure, ...]
    """One per model."""
    episodes: tuple[EpisodeEntry, ...]


@dataclass(frozen=True)
class EpisodePage:
    """One full episode."""

    anchor: str
    entry: EpisodeEntry
    event_anchor: str
    event: Event
    chart: Markup
    steps: tuple[StepView, ...]


class Episode:
    """The forecasts of one (run, model, mode, event, rollout), in order of date."""

    def __init__(self, run: ScoredRun, first: ForecastKey) -> None:
        self.run = run
        self.key = first
        self.event = run.events[first.event]
        self.records: list[ForecastRecord] = []
        self.scored: dict[ForecastKey, ScoredForecast] = {}
        self.anchor = ""
        """Set when its page is in the file."""

    @property
    def forecasts(self) -> list[ScoredForecast]:
        """The scored ones, in order of date."""
        return [self.scored[r.key] for r in self.records if r.key in self.scored]


class EventEpisodes:
    """One event with every episode about it, over all runs."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.episodes: list[Episode] = []
        self.anchor = ""

    @property
    def forecasts(self) -> list[ScoredForecast]:
        """The scored ones of all episodes."""
        return [f for episode in self.episodes for f in episode.forecasts]


def group_events(runs: Sequence[ScoredRun]) -> list[EventEpisodes]:
    """Every event of the runs in the order of the browser; those without a scored forecast come last."""
    groups = {_event_key(e): EventEpisodes(e) for run in runs for e in run.events.values()}
    for run in runs:
        for episode in _run_episodes(run):
            groups[_event_key(episode.event)].episodes.append(episode)
    ordered = _alternating(groups)
    for index, group in enumerate(ordered):
        group.anchor = f"event-{index}"
    return ordered


def _run_episodes(run: ScoredRun) -> list[Episode]:
    """The episodes of a run: models and modes in the run's order, then rollouts."""
    scored = {f.key: f for f in run.forecasts}
    episodes: dict[tuple[str, Mode, str, int], Episode] = {}
    for record in sorted(run.records, key=lambda r: r.key.date):
        key = record.key
        episode = episodes.setdefault((key.model, key.mode, key.event, key.rollout), Episode(run, key))
        episode.records.append(record)
        if key in scored:
            episode.scored[key] = scored[key]
    place = {condition: i for i, condition in enumerate(run.conditions())}
    return sorted(episodes.values(), key=lambda e: (place[e.key.model, e.key.mode], e.key.rollout))


def _alternating(groups: dict[EventKey, EventEpisodes]) -> list[EventEpisodes]:
    means = {key: _mean([f.scores.brier for f in group.forecasts]) for key, group in groups.items()}
    ranked = sorted(((-mean, key) for key, mean in means.items() if mean is not None))
    keys = [key for _, key in ranked]
    alternating = [keys[i // 2] if i % 2 == 0 else keys[-1 - i // 2] for i in range(len(keys))]
    return [groups[k] for k in (*alternating, *sorted(k for k, mean in means.items() if mean is None))]


def embed_episodes(
    template: jinja2.Template, events: Sequence[EventEpisodes], most: int, most_bytes: int
) -> list[Markup]:
    """The markup of the full episodes that fit, whose `anchor` it sets.

    All models and modes of an event come before the next event; further rollouts come last.
    """
    wanted = sorted(
        ((group, episode) for group in events for episode in group.episodes),
        # A stable sort: within one rollout index the events keep their order.
        key=lambda pair: pair[1].key.rollout,
    )
    markup: list[Markup] = []
    size = 0
    for group, episode in wanted[:most]:
        anchor = f"episode-{len(markup)}"
        page = _episode_page(anchor, group.anchor, episode)
        text = template.render(page=page, breaches=breaches(page.steps))
        size += len(text.encode())
        if size > most_bytes:
            break
        episode.anchor = anchor
        markup.append(Markup(text))
    return markup


def event_entry(group: EventEpisodes) -> EventEntry:
    """The row and the page of one event."""
    event, forecasts = group.event, group.forecasts
    return EventEntry(
        anchor=group.anchor,
        event=event,
        forecasts=len(forecasts),
        dates=len({f.key.date for f in forecasts}),
        brier=_mean([f.scores.brier for f in forecasts]),
        market=_mean([brier(f.market, f.outcome) for f in forecasts if f.market]),
        floor=_mean([brier(f.floor, f.outcome) for f in forecasts if f.floor]),
        charts=tuple(_charts(group)),
        episodes=tuple(_entry(e, e.anchor) for e in group.episodes),
    )


def _charts(group: EventEpisodes) -> list[Figure]:
    by_model: dict[tuple[str, str], list[Episode]] = {}
    for episode in group.episodes:
        if episode.forecasts:
            by_model.setdefault((episode.run.name, episode.key.model), []).append(episode)
    width = 1120 if len(by_model) == 1 else 520
    figures = []
    for (run, model), episodes in list(by_model.items())[:CHARTS]:
        curves = [_curve(f"{e.key.mode}, rollout {e.key.rollout}", e) for e in episodes]
        known = _known(group.event, [f for e in episodes for f in e.forecasts])
        chart = probability_plot([*known, *curves[:CURVES]], f"Probability of the outcome: {model}, {run}", width)
        note = f"{len(curves) - CURVES} more episodes are not drawn." if len(curves) > CURVES else ""
        figures.append(Figure(title=f"{model} ({run})", note=note, chart=chart))
    if len(by_model) > CHARTS:
        last = figures.pop()
        note = f"{last.note} {len(by_model) - CHARTS} more models are not charted.".strip()
        figures.append(Figure(title=last.title, note=note, chart=last.chart))
    return figures


def _episode_page(anchor: str, event_anchor: str, episode: Episode) -> EpisodePage:
    lag = episode.run.settings.retrieval.cutoff_lag_days
    with RunDirectory(episode.run.path).ledger() as ledger:
        steps = tuple(
            step_view(record, episode.scored.get(record.key), ledger.trajectory(record.key), lag)
            for record in episode.records
        )
    lines = []
    if episode.forecasts:
        lines = [*_known(episode.event, episode.forecasts), _curve(f"{episode.key.model}, {episode.key.mode}", episode)]
    return EpisodePage(
        anchor=anchor,
        entry=_entry(episode, anchor),
        event_anchor=event_anchor,
        event=episode.event,
        chart=probability_plot(lines, "Probability of the realized outcome by day"),
        steps=steps,
    )


def _entry(episode: Episode, anchor: str) -> EpisodeEntry:
    return EpisodeEntry(
        run=episode.run.name,
        model=episode.key.model,
        mode=episode.key.mode,
        rollout=episode.key.rollout,
        anchor=anchor,
        dates=len(episode.records),
        usable=sum(is_usable(r, episode.event.selection) for r in episode.records),
        brier=_mean([f.scores.brier for f in episode.forecasts]),
    )


def _curve(label: str, episode: Episode) -> DatedLine:
    points = tuple((f.key.date, f.probabilities.get(f.outcome, 0.0)) for f in episode.forecasts)
    fallback = frozenset(f.key.date for f in episode.forecasts if not f.usable)
    return DatedLine(label=label, style=mode_style(episode.key.mode), points=points, hollow=fallback)


def _known(event: Event, forecasts: Sequence[ScoredForecast]) -> list[DatedLine]:
    """The market and the floor, over the days that the forecasts span."""
    days = {f.key.date for f in forecasts}
    lines = []
    if days:
        market = tuple((d, p) for d, p in market_line(event) if min(days) <= d <= max(days))
        if market:
            lines.append(DatedLine(label="market", style="market", points=market, dots=False))
    floor = {f.key.date: f.floor[f.outcome] for f in forecasts if f.floor and f.outcome in f.floor}
    if floor:
        lines.append(DatedLine(label="floor", style="floor", points=tuple(sorted(floor.items())), dots=False))
    return lines


def _event_key(event: Event) -> EventKey:
    return event.id, event.question, "\n".join(event.outcome)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
