"""Figures in README and docs/ that come from committed reports.

    <!-- suite: brevity, instant; 30; win_rate -->92%<!-- end -->
    <!-- drawn: tuning, instant; 30; worst -->42%<!-- end -->

The comment names the report, its row and what of it is shown. `python -m tests.docs.figures` writes all
figures again. test_figures.py fails where a page says something else.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from apps.prove import drawn_report, drawn_suite, suite
from apps.prove.report import Point, join_trials

ROOT = Path(__file__).resolve().parents[2]
PROVE = ROOT / "apps" / "prove"
_MARK = re.compile(r"<!-- (\w+): ([^;>]+); (\d+); (\w+) -->(.*?)<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def marks(text: str) -> Iterator[tuple[str, str, int, str, str]]:
    """(report, row, ratings, what, figure) of each mark."""
    for found in _MARK.finditer(text):
        report, row, ratings, what, figure = found.groups()
        yield report, row, int(ratings), what, figure


def rewritten(text: str) -> str:
    """The text with each figure as its report has it."""

    def write(found: re.Match[str]) -> str:
        report, row, ratings, what, _ = found.groups()
        head = found.group(0).partition("-->")[0] + "-->"
        return f"{head}{figure(report, row, int(ratings), what)}<!-- end -->"

    return _MARK.sub(write, text)


def figure(report: str, row: str, ratings: int, what: str) -> str:
    """KeyError for a row that the report lacks."""
    return {"suite": _of_suite, "drawn": _of_drawn}[report](row, ratings, what)


@cache
def suite_points() -> dict[tuple[str, int], Point]:
    """The points of all cells of REPORT.jsonl, by cell and ratings."""
    found = suite.results(PROVE / "REPORT.jsonl")
    keys = list(dict.fromkeys(r["key"] for r in found))
    cells = {key: join_trials(suite.checkpoints([r for r in found if r["key"] == key])) for key in keys}
    return {(key, point.ratings): point for key, of in cells.items() for point in of}


def _of_suite(row: str, ratings: int, what: str) -> str:
    point = suite_points()[row, ratings]
    if what == "interval":
        return f"{point.win_ci[0]:.0%} to {point.win_ci[1]:.0%}"
    value = getattr(point, what)
    if what == "kl":
        return f"{value:.3f}"
    if what == "ppl_change":
        return f"{value:+.1%}"
    if what in ("variety", "variety_worst"):  # the share that is lost
        return f"{1 - value:.0%}"
    return f"{value:.0%}"


@cache
def drawn_spreads() -> dict[tuple[str, int], drawn_report.ArmSpread]:
    """Return the distributions of drawn users. A key is ("family, arm", number of ratings)."""
    found = {}
    for name in ("DRAWN.jsonl", "DRAWN-STYLE.jsonl"):
        results = drawn_suite.results(PROVE / name)
        for family in dict.fromkeys(r["family"] for r in results):
            for spread in drawn_report.distributions([r for r in results if r["family"] == family]):
                found[f"{family}, {spread.arm}", spread.ratings] = spread
    return found


def _of_drawn(row: str, ratings: int, what: str) -> str:
    spread = drawn_spreads()[row, ratings]
    if what == "interval":
        return f"{spread.win_ci[0]:.0%} to {spread.win_ci[1]:.0%}"
    if what == "worst":
        return f"{spread.worst.win_rate:.0%}"
    if what == "users":
        return str(spread.users)
    return f"{spread.win_rate:.0%}"


def main() -> int:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := rewritten(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: figures written again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
