"""What a run amounts to, one row per (run, model, mode): counts, scores with intervals, references, and cost.

Means run over scored forecasts: unusable reports count as uniform, and the same means over usable reports alone stand
beside them. Missing forecasts and those lost to the run are counted and enter no mean. Every reference is computed over
the same forecasts as the row it stands under, or says over how many of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from cluster.config import ScoreSettings
from cluster.failures import FailureKind
from cluster.record import Record
from eval.bootstrap import Interval, PairedDifference, clustered_mean, paired_difference
from eval.calibration import Calibration, calibration
from eval.discrete import ScoredAnswer
from eval.longitudinal import StageTable, stage_table
from eval.runs import ScoredRun, load_run
from eval.scoring import ProbabilityScores, ScoredForecast, is_usable, uniform
from rollout.events.event import Belief, Event, Selection
from rollout.record import ForecastRecord, Mode

ReferenceName = Literal["uniform", "market", "floor"]


class Counts(Record):
    """Where the scheduled forecasts are."""

    scheduled: int
    recorded: int
    missing: int
    """Scheduled and not recorded (yet)."""
    lost: int
    """Recorded, but failed by infrastructure, data or a bug: not scored."""
    scored: int
    unusable: int
    """Scored by the fallback."""
    usable_strict: int
    """Recorded reports that the strict policy accepts."""
    usable_lenient: int
    events: int
    """Events with a scored forecast."""

    def share(self, count: int) -> float | None:
        """`count` over the recorded forecasts; None when there are none."""
        return count / self.recorded if self.recorded else None


class FailureCount(Record):
    """One reason for which forecasts have no usable report."""

    kind: FailureKind
    reason: str
    n: int


class MeanScores(Record):
    """Means with intervals over one set of forecasts. Intervals are None when no forecast has the value."""

    n: int
    brier: Interval | None
    """Multiclass, [0, 2]."""
    binary_brier: Interval | None
    """[0, 1], two-option events only."""
    accuracy: Interval | None
    log_loss: Interval | None
    """Nats."""
    alpha: Interval | None
    """Information-α, nats; forecasts with a market probability only."""


class Reference(Record):
    """Scores of a reference forecaster over the row's own forecasts that it covers."""

    name: ReferenceName
    n: int
    """Forecasts it covers; compare with the row's scored ones."""
    brier: Interval
    accuracy: float
    log_loss: float
    difference: Interval
    """Brier of the row minus Brier of the reference, forecast by forecast; negative where the row is better."""


class AnswerScores(Record):
    """Means of multi-answer events."""

    n: int
    unusable: int
    exact: Interval
    recall_or_zero: Interval
    f1_points: Interval


class MeanUsage(Record):
    """Per recorded forecast."""

    model_calls: float
    tool_calls: dict[str, float]
    tool_errors: dict[str, float]
    malformed_calls: dict[str, float]
    cut_characters: dict[str, float]
    input_tokens: float
    cached_tokens: float
    output_tokens: float
    seconds: float
    model_seconds: float
    tool_seconds: float
    price: float
    """US dollars asked by an endpoint; 0 for our own engines."""
    attempts: float


class Row(Record):
    """One model in one mode of one run."""

    run: str
    """The run's path, as it was given."""
    model: str
    mode: Mode
    counts: Counts
    failures: tuple[FailureCount, ...]
    """Most frequent first."""
    scores: MeanScores
    """With the fallback."""
    usable_scores: MeanScores
    """Usable reports only: what the fallback hides or flatters."""
    references: tuple[Reference, ...]
    stages: StageTable
    calibration: Calibration
    answers: AnswerScores | None
    """None without multi-answer events."""
    usage: MeanUsage | None
    """None while nothing is recorded."""

    def reference(self, name: ReferenceName) -> Reference | None:
        """The reference of that name; None where it covers no forecast."""
        return next((r for r in self.references if r.name == name), None)


class PairedRow(Record):
    """One row against the first row of the same mode: Brier, second minus first."""

    mode: Mode
    first: str
    """`model (run)`."""
    second: str
    brier: PairedDifference


class Scores(Record):
    """All rows of the given runs: the figures of `pastcast score --json` and of the report."""

    settings: ScoreSettings
    rows: tuple[Row, ...]
    paired: tuple[PairedRow, ...]


def score_runs(paths: Sequence[Path], settings: ScoreSettings) -> Scores:
    """Read, score and summarize runs. Raises DataError if a path is no run."""
    return summarize([load_run(path) for path in paths], settings)


def summarize(runs: Sequence[ScoredRun], settings: ScoreSettings) -> Scores:
    """The summary of runs that are read already."""
    return Scores(
        settings=settings,
        rows=tuple(summarize_condition(run, model, mode, settings) for run in runs for model, mode in run.conditions()),
        paired=tuple(_paired_rows(runs, settings)),
    )


def summarize_condition(run: ScoredRun, model: str, mode: Mode, settings: ScoreSettings) -> Row:
    """The row of one model in one mode."""
    scheduled = [k for k in run.scheduled if (k.model, k.mode) == (model, mode)]
    records = [r for r in run.records if (r.key.model, r.key.mode) == (model, mode)]
    forecasts = [f for f in run.forecasts if (f.key.model, f.key.mode) == (model, mode)]
    answers = [a for a in run.answers if (a.key.model, a.key.mode) == (model, mode)]
    return Row(
        run=str(run.path),
        model=model,
        mode=mode,
        counts=_counts(len(scheduled), records, forecasts, answers),
        failures=_failures(records, run.events),
        scores=mean_scores(forecasts, settings),
        usable_scores=mean_scores([f for f in forecasts if f.usable], settings),
        references=_references(forecasts, settings),
        stages=stage_table(forecasts, run.dates(), settings),
        calibration=calibration(forecasts),
        answers=_answer_scores(answers, settings),
        usage=_mean_usage(records),
    )


def mean_scores(forecasts: Sequence[ScoredForecast], settings: ScoreSettings) -> MeanScores:
    """Means and event-clustered intervals of every score."""

    def mean(value: Callable[[ScoredForecast], float | None]) -> Interval | None:
        found = [(v, f.key.event) for f in forecasts if (v := value(f)) is not None]
        return clustered_mean([v for v, _ in found], [event for _, event in found], settings)

    return MeanScores(
        n=len(forecasts),
        brier=mean(lambda f: f.scores.brier),
        binary_brier=mean(lambda f: f.binary_brier),
        accuracy=mean(lambda f: f.scores.accuracy),
        log_loss=mean(lambda f: f.scores.log_loss),
        alpha=mean(lambda f: f.alpha),
    )


def condition_name(run: ScoredRun, model: str) -> str:
    """A model in a run, as comparisons name it."""
    return f"{model} ({run.name})"


def _counts(
    scheduled: int,
    records: Sequence[ForecastRecord],
    forecasts: Sequence[ScoredForecast],
    answers: Sequence[ScoredAnswer],
) -> Counts:
    scored: list[ScoredForecast | ScoredAnswer] = [*forecasts, *answers]
    reports = [r.report for r in records if r.report is not None]
    return Counts(
        scheduled=scheduled,
        recorded=len(records),
        missing=scheduled - len(records),
        lost=len(records) - len(scored),
        scored=len(scored),
        unusable=sum(not s.usable for s in scored),
        usable_strict=sum(r.usable_strict for r in reports),
        usable_lenient=sum(r.usable_lenient for r in reports),
        events=len({s.key.event for s in scored}),
    )


def failure_of(record: ForecastRecord, selection: Selection) -> tuple[FailureKind, str] | None:
    """(kind, reason) by which a record is counted; None for a usable one."""
    if is_usable(record, selection):
        return None
    if record.failure is not None:
        return record.failure.kind, record.failure.reason
    return "model", "unusable-report"


def _failures(records: Sequence[ForecastRecord], events: Mapping[str, Event]) -> tuple[FailureCount, ...]:
    found = Counter(f for r in records if (f := failure_of(r, events[r.key.event].selection)) is not None)
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return tuple(FailureCount(kind=kind, reason=reason, n=n) for (kind, reason), n in ranked)


def _references(forecasts: Sequence[ScoredForecast], settings: ScoreSettings) -> tuple[Reference, ...]:
    sources: dict[ReferenceName, Callable[[ScoredForecast], Belief | None]] = {
        "uniform": lambda f: uniform(f.options),
        "market": lambda f: f.market,
        "floor": lambda f: f.floor,
    }
    found = (_reference(name, source, forecasts, settings) for name, source in sources.items())
    return tuple(r for r in found if r is not None)


def _reference(
    name: ReferenceName,
    source: Callable[[ScoredForecast], Belief | None],
    forecasts: Sequence[ScoredForecast],
    settings: ScoreSettings,
) -> Reference | None:
    covered = [(f, ProbabilityScores.of(d, f.outcome)) for f in forecasts if (d := source(f)) is not None]
    events = [f.key.event for f, _ in covered]
    brier = clustered_mean([s.brier for _, s in covered], events, settings)
    difference = clustered_mean([f.scores.brier - s.brier for f, s in covered], events, settings)
    if brier is None or difference is None:
        return None
    return Reference(
        name=name,
        n=len(covered),
        brier=brier,
        accuracy=sum(s.accuracy for _, s in covered) / len(covered),
        log_loss=sum(s.log_loss for _, s in covered) / len(covered),
        difference=difference,
    )


def _answer_scores(answers: Sequence[ScoredAnswer], settings: ScoreSettings) -> AnswerScores | None:
    events = [a.key.event for a in answers]
    exact = clustered_mean([a.scores.exact for a in answers], events, settings)
    recall = clustered_mean([a.scores.recall_or_zero for a in answers], events, settings)
    points = clustered_mean([a.scores.f1_points for a in answers], events, settings)
    if exact is None or recall is None or points is None:
        return None
    return AnswerScores(
        n=len(answers),
        unusable=sum(not a.usable for a in answers),
        exact=exact,
        recall_or_zero=recall,
        f1_points=points,
    )


def _mean_usage(records: Sequence[ForecastRecord]) -> MeanUsage | None:
    if not records:
        return None
    usages = [r.usage for r in records]
    n = len(usages)

    def by_name(counts: Sequence[dict[str, int]]) -> dict[str, float]:
        total: Counter[str] = Counter()
        for count in counts:
            total.update(count)
        return {name: total[name] / n for name in sorted(total)}

    return MeanUsage(
        model_calls=sum(u.model_calls for u in usages) / n,
        tool_calls=by_name([u.tool_calls for u in usages]),
        tool_errors=by_name([u.tool_errors for u in usages]),
        malformed_calls=by_name([u.malformed_calls for u in usages]),
        cut_characters=by_name([u.cut_characters for u in usages]),
        input_tokens=sum(u.input_tokens for u in usages) / n,
        cached_tokens=sum(u.cached_tokens for u in usages) / n,
        output_tokens=sum(u.output_tokens for u in usages) / n,
        seconds=sum(u.seconds for u in usages) / n,
        model_seconds=sum(u.model_seconds for u in usages) / n,
        tool_seconds=sum(u.tool_seconds for u in usages) / n,
        price=sum(u.price for u in usages) / n,
        attempts=sum(r.attempts for r in records) / n,
    )


def _paired_rows(runs: Sequence[ScoredRun], settings: ScoreSettings) -> list[PairedRow]:
    first: dict[Mode, tuple[str, list[ScoredForecast]]] = {}
    rows = []
    for run in runs:
        for model, mode in run.conditions():
            forecasts = [f for f in run.forecasts if (f.key.model, f.key.mode) == (model, mode)]
            name = condition_name(run, model)
            if mode not in first:
                first[mode] = (name, forecasts)
                continue
            reference, others = first[mode]
            paired = paired_difference(others, forecasts, lambda f: f.scores.brier, settings)
            rows.append(PairedRow(mode=mode, first=reference, second=name, brier=paired))
    return rows
