"""This module draws learning curves: how often a learned model's reply is better, after each number of
ratings."""

from collections.abc import Mapping, Sequence

from ..charts import Axis, Point, lines

BELOW = "ratings; how often the reply is better than the original model's"


def curves(title: str, series: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG plot of the win-rate (how often the reply is better than the original model's reply) over
    the number of ratings. Each line starts at a win-rate of 50% for 0 ratings.

    series: {name of a line: its points (ratings, win-rate, lower end and upper end of the 95% interval)}
    """
    most = max((point[0] for line in series.values() for point in line), default=1)
    from_half = {name: [(0, 0.5, 0.5, 0.5), *line] for name, line in series.items()}
    ratings = Axis(0, most, sorted({0, 30, 100, most} if most >= 100 else {0, most}), ".0f")
    rate = Axis(0, 1, (0, 0.25, 0.5, 0.75, 1), ".0%", strong=0.5)
    return lines(title, BELOW, from_half, ratings, rate)
