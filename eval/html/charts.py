"""Small inline SVG pictures: markup only, colours from the page's style sheet, every mark with a title to hover.

Labels are escaped here; the functions know positions and values, not what they mean.
"""

import datetime as dt
import math
from collections.abc import Sequence

from markupsafe import Markup

from cluster.record import Record
from eval.bootstrap import Interval
from eval.calibration import Calibration


class Mark(Record):
    """A reference value in a lane."""

    style: str
    """A class of the style sheet: `uniform`, `market` or `floor`."""
    value: float


class Lane(Record):
    """One row of an interval plot."""

    group: str
    label: str
    style: str
    interval: Interval
    marks: tuple[Mark, ...]


class Point(Record):
    """A value at a stage, with whiskers where there is an interval."""

    value: float
    low: float | None = None
    high: float | None = None


class StageLine(Record):
    """One line of a stage plot, its points aligned with the stages."""

    label: str
    style: str
    points: tuple[Point, ...]


class DatedLine(Record):
    """One line of a probability plot."""

    label: str
    style: str
    points: tuple[tuple[dt.date, float], ...]
    """(day, probability) in order of day."""
    dots: bool = True
    hollow: frozenset[dt.date] = frozenset()
    """Days whose dot is drawn hollow: the model reported nothing usable there."""


class Scale:
    """A linear map from values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, about `wanted` of them."""
    raw = max(high - low, 1e-6) / wanted
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def interval_plot(lanes: Sequence[Lane], label: str) -> Markup:
    """One lane per row: a dot with whiskers, and the references' marks over the same forecasts."""
    values = [v for lane in lanes for v in _extent(lane)]
    marks = ticks(min(values), max(values), 6)
    width, left, right, top, height = 1120, 330, 24, 12, 30
    bottom = top + height * len(lanes)
    x = Scale(marks[0], marks[-1], left, width - right)
    parts = [_line(x(m), top, x(m), bottom, "grid") for m in marks]
    parts += [_text(x(m), bottom + 18, _number(m), "tick", "middle") for m in marks]
    parts.append(_text((left + width - right) / 2, bottom + 36, label, "axis", "middle"))
    previous = ""
    for index, lane in enumerate(lanes):
        y = top + height * (index + 0.5)
        if lane.group != previous:
            if index:
                parts.append(_line(0, y - height / 2, width - right, y - height / 2, "rule"))
            parts.append(_text(0, y + 4, shortened(lane.group, 32), "label strong", "start", lane.group))
            previous = lane.group
        parts.append(_text(left - 16, y + 4, lane.label, "label", "end"))
        parts += [_reference(x(m.value), y, m) for m in lane.marks]
        parts.append(_whisker_dot(x, y, lane))
    return _svg(width, bottom + 44, f"{label} by model and mode", parts)


def stage_plot(lines: Sequence[StageLine], stages: Sequence[str], domain: tuple[float, float], title: str) -> Markup:
    """Values over the stages, one line each; `domain` is shared by the panels of a figure."""
    width, height, left, top, bottom = 300, 210, 44, 12, 28
    marks = ticks(*domain, 4)
    y = Scale(marks[0], marks[-1], height - bottom, top)
    x = Scale(0, max(1, len(stages) - 1), left + 26, width - 26)
    parts = [_line(left, y(m), width - 8, y(m), "grid") for m in marks]
    parts += [_text(left - 8, y(m) + 4, _number(m), "tick", "end") for m in marks]
    parts += [_text(x(i), height - 8, stage, "tick", "middle") for i, stage in enumerate(stages)]
    middle = (len(lines) - 1) / 2
    for order, line in enumerate(lines):
        shift = (order - middle) * 3.0
        spots = [(x(i) + shift, y(p.value)) for i, p in enumerate(line.points)]
        parts.append(_path(spots, line.style))
        for (px, py), p, stage in zip(spots, line.points, stages, strict=True):
            if p.low is not None and p.high is not None:
                parts.append(_line(px, y(p.low), px, y(p.high), f"whisker {line.style}"))
            parts.append(_dot(px, py, 3.5, line.style, f"{line.label}, {stage}: {p.value:.3f}"))
    return _svg(width, height, f"Brier by stage: {title}", parts)


def calibration_plot(table: Calibration, style: str, title: str) -> Markup:
    """Frequency against stated probability; the area of a dot grows with its number of options."""
    size, left, top, bottom = 210, 36, 10, 30
    x, y = Scale(0, 1, left, size - 10), Scale(0, 1, size - bottom, top)
    parts = [_line(left, y(m), size - 10, y(m), "grid") for m in (0.0, 0.5, 1.0)]
    parts += [_line(x(m), top, x(m), size - bottom, "grid") for m in (0.0, 0.5, 1.0)]
    parts += [_text(left - 6, y(m) + 4, _number(m), "tick", "end") for m in (0.0, 0.5, 1.0)]
    parts += [_text(x(m), size - 12, _number(m), "tick", "middle") for m in (0.0, 0.5, 1.0)]
    parts.append(_line(x(0), y(0), x(1), y(1), "diagonal"))
    filled = [
        (b.mean_probability, b.frequency, b.n)
        for b in table.bins
        if b.mean_probability is not None and b.frequency is not None
    ]
    parts.append(_path([(x(p), y(f)) for p, f, _ in filled], style))
    most = max((n for *_, n in filled), default=1)
    for p, f, n in filled:
        radius = 2.5 + 5.5 * math.sqrt(n / most)
        parts.append(_dot(x(p), y(f), radius, f"{style} soft", f"said {p:.2f}, came true {f:.2f} ({n} options)"))
    return _svg(size, size, f"Calibration: {title}", parts)


def probability_plot(lines: Sequence[DatedLine], title: str, width: int = 1120) -> Markup:
    """Probability of the realized outcome by day; empty without a point. `width` in pixels at full size."""
    days = sorted({day.toordinal() for line in lines for day, _ in line.points})
    if not days:
        return Markup("")
    height, left, top, bottom = 270, 44, 12, 34
    x = Scale(days[0], days[-1], left + 14, width - 24)
    y = Scale(0, 1, height - bottom, top)
    parts = [_line(left, y(m), width - 10, y(m), "grid") for m in (0.0, 0.25, 0.5, 0.75, 1.0)]
    parts += [_text(left - 8, y(m) + 4, _number(m), "tick", "end") for m in (0.0, 0.25, 0.5, 0.75, 1.0)]
    for tick in _spread(days, max(2, width // 160)):
        parts.append(_text(x(tick), height - 10, dt.date.fromordinal(tick).isoformat(), "tick", "middle"))
    for line in lines:
        spots = [(x(day.toordinal()), y(p)) for day, p in line.points]
        parts.append(_path(spots, line.style))
        for (px, py), (day, p) in zip(spots, line.points, strict=True):
            # A line of one point is invisible without its dot.
            if line.dots or len(spots) == 1:
                style = f"{line.style} hollow" if day in line.hollow else line.style
                parts.append(_dot(px, py, 4.0, style, f"{line.label}, {day}: {p:.3f}"))
    return _svg(width, height, title, parts)


def shortened(text: str, characters: int) -> str:
    """At most `characters`, the cut shown by an ellipsis."""
    return text if len(text) <= characters else text[: characters - 1].rstrip() + "…"


def _extent(lane: Lane) -> list[float]:
    own = (lane.interval.mean, lane.interval.low, lane.interval.high)
    return [v for v in own if v is not None] + [m.value for m in lane.marks]


def _spread(values: Sequence[int], most: int) -> list[int]:
    if len(values) <= most:
        spaced = (values[-1] - values[0]) / (most + 2)
        kept = [values[0]]
        kept += [v for i, v in enumerate(values[1:]) if v - values[i] >= spaced]
        return kept
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _whisker_dot(x: Scale, y: float, lane: Lane) -> Markup:
    interval = lane.interval
    title = f"{lane.group}, {lane.label}: {interval.mean:.3f}"
    parts = []
    if interval.low is not None and interval.high is not None:
        title += f" [{interval.low:.3f}, {interval.high:.3f}]"
        parts.append(_line(x(interval.low), y, x(interval.high), y, f"whisker {lane.style}"))
        parts += [_line(x(v), y - 4, x(v), y + 4, f"whisker {lane.style}") for v in (interval.low, interval.high)]
    parts.append(_dot(x(interval.mean), y, 5.5, lane.style, title))
    return Markup("").join(parts)


def _reference(x: float, y: float, mark: Mark) -> Markup:
    shapes = {
        "uniform": f"M{x:.1f},{y - 8:.1f}V{y + 8:.1f}",
        "market": f"M{x:.1f},{y - 6:.1f}l6,6l-6,6l-6,-6z",
        "floor": f"M{x - 6:.1f},{y - 5:.1f}h12l-6,10z",
    }
    return Markup('<path class="mark {}" d="{}"><title>{}: {}</title></path>').format(
        mark.style, shapes[mark.style], mark.style, f"{mark.value:.3f}"
    )


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return Markup('<path class="{}" d="M{},{}L{},{}"/>').format(
        style, f"{x1:.1f}", f"{y1:.1f}", f"{x2:.1f}", f"{y2:.1f}"
    )


def _path(spots: Sequence[tuple[float, float]], style: str) -> Markup:
    if len(spots) < 2:
        return Markup("")
    return Markup('<path class="line {}" d="M{}"/>').format(style, "L".join(f"{x:.1f},{y:.1f}" for x, y in spots))


def _dot(x: float, y: float, radius: float, style: str, title: str) -> Markup:
    return Markup('<circle class="dot {}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>').format(
        style, f"{x:.1f}", f"{y:.1f}", f"{radius:.1f}", title
    )


def _text(x: float, y: float, content: str, style: str, anchor: str, title: str = "") -> Markup:
    hover = Markup("<title>{}</title>").format(title) if title else ""
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}{}</text>').format(
        style, f"{x:.1f}", f"{y:.1f}", anchor, content, hover
    )


def _svg(width: int, height: int, label: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" style="max-width:{}px">{}</svg>').format(
        width, height, label, width, Markup("").join(parts)
    )
