"""The report's figures, from summary rows: scores against references, Brier by stage, calibration."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from eval.html.charts import Lane, Mark, Point, StageLine, calibration_plot, interval_plot, stage_plot
from eval.longitudinal import STAGES
from eval.summary import Row, Scores


@dataclass(frozen=True)
class Figure:
    """A small chart with its caption."""

    title: str
    note: str
    chart: Markup


def mode_style(mode: str) -> str:
    """The style-sheet class of a mode's colour."""
    return f"mode-{mode}"


def _row_name(row: Row, several: bool) -> str:
    return f"{row.model} · {Path(row.run).resolve().name}" if several else row.model


def score_plot(scores: Scores) -> Markup:
    """One lane per model and mode; empty when nothing is scored."""
    several = _same_model_twice(scores)
    lanes = [
        Lane(
            group=_row_name(row, several),
            label=row.mode,
            style=mode_style(row.mode),
            interval=row.scores.brier,
            marks=tuple(Mark(style=r.name, value=r.brier.mean) for r in row.references),
        )
        for row in scores.rows
        if row.scores.brier is not None
    ]
    return interval_plot(lanes, "Brier score, lower is better") if lanes else Markup("")


def _same_model_twice(scores: Scores) -> bool:
    pairs = [(row.model, row.mode) for row in scores.rows]
    return len(set(pairs)) < len(pairs)


def stage_figures(scores: Scores) -> list[Figure]:
    """One panel per model, all on one scale."""
    several = _same_model_twice(scores)
    by_name: dict[str, list[Row]] = {}
    for row in scores.rows:
        if row.stages.stages:
            by_name.setdefault(_row_name(row, several), []).append(row)
    figures = {name: list(_stage_lines(rows)) for name, rows in by_name.items()}
    values = [
        v
        for lines in figures.values()
        for line in lines
        for p in line.points
        for v in (p.value, p.low, p.high)
        if v is not None
    ]
    return [
        Figure(
            title=name,
            note=_stage_note(by_name[name]),
            chart=stage_plot(lines, STAGES, (min(values), max(values)), name),
        )
        for name, lines in figures.items()
    ]


def _stage_lines(rows: Sequence[Row]) -> Iterator[StageLine]:
    widest = max(rows, key=lambda r: r.stages.events).stages.stages
    market = [s.market for s in widest if s.market is not None]
    floor = [s.floor for s in widest if s.floor is not None]
    known = {"uniform": [s.uniform for s in widest], "market": market, "floor": floor}
    for name, values in known.items():
        if len(values) == len(widest):
            yield StageLine(label=name, style=name, points=tuple(Point(value=v) for v in values))
    for row in rows:
        points = tuple(Point(value=s.brier.mean, low=s.brier.low, high=s.brier.high) for s in row.stages.stages)
        yield StageLine(label=row.mode, style=mode_style(row.mode), points=points)


def _stage_note(rows: Sequence[Row]) -> str:
    kept = sorted({row.stages.events for row in rows})
    left_out = max(row.stages.left_out for row in rows)
    text = f"{'–'.join(str(k) for k in (kept if len(kept) < 2 else (kept[0], kept[-1])))} events"
    return f"{text}, {left_out} left out" if left_out else text


def calibration_figures(scores: Scores) -> list[Figure]:
    """One panel per row with a usable forecast."""
    several = _same_model_twice(scores)
    return [
        Figure(
            title=f"{_row_name(row, several)}, {row.mode}",
            note=f"ECE {row.calibration.ece:.3f}, {row.calibration.n} option probabilities",
            chart=calibration_plot(row.calibration, mode_style(row.mode), f"{row.model}, {row.mode}"),
        )
        for row in scores.rows
        if row.calibration.ece is not None
    ]
