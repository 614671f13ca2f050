"""This module draws SVG charts: line charts with intervals, scatter plots, and bar charts. The SVG has only
shapes and text elements."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float, float, float]  # x, y, and the lower and upper end of the interval of y

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 54, 150, 30, 44
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569")
INK, GREY, PALE = "#111827", "#374151", "#e5e7eb"


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`. form: the format of tick labels. strong: the tick of the y axis whose
    line is darker, or None."""

    low: float
    high: float
    ticks: Sequence[float]
    form: str = "g"
    strong: float | None = None
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the value's place on the axis: 0 stands for `low`, and 1 for `high`."""
        low, high, value = (math.log(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return (value - low) / (high - low) if high > low else 0.0


def lines(title: str, below: str, series: Mapping[str, Sequence[Point]], x_axis: Axis, y_axis: Axis) -> str:
    """Return a line chart. A vertical stroke shows the interval of a point, if the interval is not empty. The
    name of a line stands to the right of its last point. below: the text under the chart. series: the points
    of each line, by the name of the line."""

    x, y = _places(x_axis, y_axis)
    drawn = _frame(title, below, x_axis, y_axis)
    ends = _separate_labels([y(points[-1][1]) for points in series.values()])
    for i, ((name, points), end) in enumerate(zip(series.items(), ends, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x(at)},{y(value)}" for at, value, _, _ in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for at, value, low, high in points:
            if low != high:
                drawn.append(_stroke(x(at), y(low), x(at), y(high), colour))
            drawn.append(f'<circle cx="{x(at)}" cy="{y(value)}" r="3" fill="{colour}"/>')
        drawn.append(_text(WIDTH - RIGHT + 10, end + 4, name, colour))
    return _picture(HEIGHT, drawn)


def scatter(
    title: str, below: str, points: Sequence[tuple[float, float, float]], x_axis: Axis, y_axis: Axis
) -> str:
    """Return a scatter plot. points: (x, y, size); the area of a point's circle is proportional to its
    size."""
    x, y = _places(x_axis, y_axis)
    drawn = _frame(title, below, x_axis, y_axis)
    for at, value, size in points:
        drawn.append(
            f'<circle cx="{x(at)}" cy="{y(value)}" r="{round(3 * math.sqrt(size), 1)}" fill="{COLOURS[0]}" '
            'fill-opacity="0.45"/>'
        )
    return _picture(HEIGHT, drawn)


def _places(x_axis: Axis, y_axis: Axis) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return two functions: the first maps a value on the x axis to its x coordinate in the picture, and the
    second does the same for the y axis."""

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * x_axis.at(value), 1)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - y_axis.at(value)), 1)

    return x, y


def _frame(title: str, below: str, x_axis: Axis, y_axis: Axis) -> list[str]:
    """Return the SVG elements of the title, the axes and the ticks."""
    x, y = _places(x_axis, y_axis)
    drawn = [_text(LEFT, 18, title, INK), _text(LEFT, HEIGHT - 8, below, GREY)]
    for tick in y_axis.ticks:
        drawn.append(
            _stroke(
                x(x_axis.low), y(tick), x(x_axis.high), y(tick), "#9ca3af" if tick == y_axis.strong else PALE
            )
        )
        drawn.append(_text(LEFT - 40, y(tick) + 4, format(tick, y_axis.form), GREY))
    drawn += [
        _text(x(tick) - 8, HEIGHT - BOTTOM + 18, format(tick, x_axis.form), GREY) for tick in x_axis.ticks
    ]
    return drawn


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Return a bar chart. rows: (name, value, label) from top to bottom. A full bar is 1."""
    left, step = 330, 20
    drawn = [_text(10, 18, title, INK)]
    for i, (name, value, words) in enumerate(rows):
        top, long = 30 + step * i, round((WIDTH - left - 110) * min(1.0, max(0.0, value)), 1)
        drawn.append(_text(10, top + 13, name, GREY))
        drawn.append(_box(left, top, WIDTH - left - 110, 14, PALE))
        drawn.append(_box(left, top, long, 14, COLOURS[0]))
        drawn.append(_text(WIDTH - 104, top + 12, words, INK))
    return _picture(40 + step * len(rows), drawn)


TICKS = 5  # about the number of steps of an axis
GAP = 14.0  # the distance between two labels at least


def ticks(high: float) -> list[float]:
    """Return round numbers in equal steps from 0 up to `high`, or up to the first step above `high`. If
    `high` is not above 0, return 0 and 1."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / TICKS
    size = 10 ** math.floor(math.log10(raw))
    step = next(s * size for s in (1, 2, 2.5, 5, 10) if s * size >= raw)
    return [i * step for i in range(math.ceil(high / step - 1e-9) + 1)]


def _picture(height: float, drawn: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>{"".join(drawn)}</svg>\n'
    )


def _separate_labels(heights: Sequence[float]) -> list[float]:
    """Return the heights of labels, with some of them moved down so that neighbours are at least GAP apart
    and do not overlap."""
    placed: dict[int, float] = {}
    last = -GAP
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        last = placed[i] = max(heights[i], last + GAP)
    return [placed[i] for i in range(len(heights))]


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1"/>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, words: str, colour: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{escape(words)}</text>'
