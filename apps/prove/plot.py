"""Learning curves as a picture: SVG, nothing but lines and words."""

from collections.abc import Mapping, Sequence
from html import escape

Line = Sequence[tuple[float, float, float, float]]  # (ratings, win-rate, low, high), by rising ratings

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 54, 150, 30, 44
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569")


def curves(title: str, lines: Mapping[str, Line]) -> str:
    """Win-rate against ratings, each line with its 95% interval; all start at 50% without ratings."""
    most = max((point[0] for line in lines.values() for point in line), default=1)
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(ratings: float) -> float:
        return round(LEFT + plot_width * ratings / most, 1)

    def y(rate: float) -> float:
        return round(TOP + plot_height * (1 - rate), 1)

    drawn = [_axes(title, most, x, y)]
    ends = _apart([y(line[-1][1]) for line in lines.values()])
    for colour, (name, line), end in zip(_colours(len(lines)), lines.items(), ends, strict=True):
        points = " ".join(f"{x(r)},{y(w)}" for r, w, _, _ in [(0, 0.5, 0.5, 0.5), *line])
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for ratings, rate, low, high in line:
            drawn.append(_stroke(x(ratings), y(low), x(ratings), y(high), colour, 1))
            drawn.append(f'<circle cx="{x(ratings)}" cy="{y(rate)}" r="3" fill="{colour}"/>')
        drawn.append(_text(WIDTH - RIGHT + 10, end + 4, name, colour))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>{"".join(drawn)}</svg>\n'
    )


def _axes(title: str, most: float, x, y) -> str:
    parts = [_text(LEFT, 18, title, "#111827")]
    for rate in (0, 0.25, 0.5, 0.75, 1):
        parts.append(_stroke(x(0), y(rate), x(most), y(rate), "#9ca3af" if rate == 0.5 else "#e5e7eb", 1))
        parts.append(_text(LEFT - 40, y(rate) + 4, f"{rate:.0%}", "#374151"))
    for ratings in sorted({0, 30, 100, most} if most >= 100 else {0, most}):
        parts.append(_text(x(ratings) - 8, HEIGHT - BOTTOM + 18, f"{ratings:.0f}", "#374151"))
    parts.append(
        _text(
            LEFT, HEIGHT - 8, "ratings; how often the reply is better than the untouched model's", "#374151"
        )
    )
    return "".join(parts)


def _apart(heights: Sequence[float], gap: float = 14) -> list[float]:
    """Moved so far down that no two names cover each other."""
    placed: dict[int, float] = {}
    last = -gap
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        last = placed[i] = max(heights[i], last + gap)
    return [placed[i] for i in range(len(heights))]


def _colours(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, words: str, colour: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{escape(words)}</text>'
