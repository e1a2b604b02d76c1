"""Line charts as SVG files that stand alone: both axes logarithmic, a colour and a name at the end of every line.

They are shown in pages of documentation, on light and on dark ground, without scripts and without a library.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from cluster.record import Record

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 34, 52
_COLOURS = ("#3b76d6", "#d9822b", "#3a9a6a", "#a557b8", "#c2474f", "#5f7f8f")


class Line(Record):
    """One line of a chart."""

    label: str
    points: tuple[tuple[float, float], ...]
    """(x, y) by rising x, all above zero; at least one."""


def line_chart(lines: Sequence[Line], title: str, x_label: str, y_label: str) -> Markup:
    """The file's content. Raises ValueError where there is nothing to draw, or a value that has no logarithm."""
    values = [value for line in lines for point in line.points for value in point]
    if not values or min(values) <= 0:
        raise ValueError(f"{title}: a logarithmic chart needs values above zero")
    x_ticks = _ticks([x for line in lines for x, _ in line.points])
    y_ticks = _ticks([y for line in lines for _, y in line.points])

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = _share(x, x_ticks), _share(y, y_ticks)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 20, title, "start", bold=True)]
    for tick in x_ticks:
        x, bottom = place(tick, y_ticks[0])
        parts += [_rule(x, bottom, x, _TOP), _text(x, bottom + 18, _number(tick))]
    for tick in y_ticks:
        left, y = place(x_ticks[0], tick)
        parts += [_rule(left, y, _WIDTH - _RIGHT, y), _text(left - 8, y + 4, _number(tick), "end")]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_label))
    parts.append(_text(_WIDTH - _RIGHT, 20, y_label, "end"))
    named = _apart([place(*line.points[-1])[1] for line in lines])
    for i, line in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        spots = [place(x, y) for x, y in line.points]
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(Markup('<path d="M{}" fill="none" stroke="{}" stroke-width="2"/>').format(path, colour))
        for (x, y), (at, value) in zip(spots, line.points, strict=True):
            hover = f"{line.label}: {_number(at)}, {value:.4g}"
            parts.append(
                Markup('<circle cx="{}" cy="{}" r="3.5" fill="{}"><title>{}</title></circle>').format(
                    f"{x:.1f}", f"{y:.1f}", colour, hover
                )
            )
        parts.append(_text(_WIDTH - _RIGHT + 12, named[i] + 4, line.label, "start", colour))
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" font-family="sans-serif" font-size="13" '
        'role="img" aria-label="{}">{}</svg>\n'
    ).format(_WIDTH, _HEIGHT, _WIDTH, title, Markup("").join(parts))


def _ticks(values: Sequence[float]) -> list[float]:
    """Powers of ten around the values, with 2 and 5 between them where there are few."""
    low, high = math.floor(math.log10(min(values)) + 1e-9), math.ceil(math.log10(max(values)) - 1e-9)
    high = max(high, low + 1)
    steps = (1.0, 2.0, 5.0) if high - low <= 2 else (1.0,)
    made = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    first = max(i for i, tick in enumerate(made) if tick <= min(values) * (1 + 1e-9))
    last = min(i for i, tick in enumerate(made) if tick >= max(values) * (1 - 1e-9))
    return made[first : max(last, first + 1) + 1]


def _share(value: float, ticks: Sequence[float]) -> float:
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])
    return (math.log10(value) - low) / (high - low)


def _apart(heights: Sequence[float], least: float = 16.0) -> list[float]:
    """Places for names, from the top down, none closer to the next than `least`."""
    placed = list(heights)
    previous = -math.inf
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        placed[i] = previous = max(heights[i], previous + least)
    return placed


def _number(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _rule(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<path d="M{},{}L{},{}" stroke="#8888" stroke-width="0.7"/>').format(
        f"{x1:.1f}", f"{y1:.1f}", f"{x2:.1f}", f"{y2:.1f}"
    )


def _text(x: float, y: float, content: str, anchor: str = "middle", colour: str = "#888", bold: bool = False) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}" fill="{}"{}>{}</text>').format(
        f"{x:.1f}", f"{y:.1f}", anchor, colour, Markup(' font-weight="bold"') if bold else "", content
    )
