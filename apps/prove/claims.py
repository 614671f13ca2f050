"""This module has the claims about learning that the suite of experiments (suite.py) must show. A figure from
the results decides whether a claim is met."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .report import Point
from .users import HOSTILE, TASTES

Found = Mapping[str, list[Point]]  # cell ("user, arm") -> its results, without users out of reach


@dataclass(frozen=True)
class ClaimVerdict:
    claim: str
    figure: str
    met: bool | None  # True if the claim is met; None if the figure was not measured


def verdicts(found: Found) -> list[ClaimVerdict]:
    return [claim(found) for claim in _CLAIMS]


def _at(found: Found, key: str, ratings: int) -> Point | None:
    return next((p for p in found.get(key, []) if p.ratings == ratings), None)


def _one(
    words: str, key: str, ratings: int, good: Callable[[Point], bool]
) -> Callable[[Found], ClaimVerdict]:
    def look(found: Found) -> ClaimVerdict:
        point = _at(found, key, ratings)
        return ClaimVerdict(words, rate(point) if point else "-", good(point) if point else None)

    return look


def _beats(words: str, better: str, worse: str) -> Callable[[Found], ClaimVerdict]:
    """Return a claim that the cell `better` has more mean stars than the cell `worse` after 100 ratings. The
    key "A against B" of the results has the results of cell A for the seeds that cell B also has."""

    def look(found: Found) -> ClaimVerdict:
        a, b = _at(found, f"{better} against {worse}", 100), _at(found, f"{worse} against {better}", 100)
        if a is None or b is None:
            return ClaimVerdict(words, "-", None)
        return ClaimVerdict(words, f"{a.score:.2f} against {b.score:.2f} stars", a.score > b.score)

    return look


def _others(found: Found) -> ClaimVerdict:
    """Return the verdict on all simulated users except `brevity` and `context`. The user `context` is left
    out, because its taste needs the full loop (ratings and training), not only the instant loop (ratings)."""
    points = {u: _at(found, f"{u}, instant", 100) for u in TASTES if u not in ("brevity", "context")}
    good = [u for u, p in points.items() if p and p.win_rate > 0.6 and p.win_ci[0] > 0.5]
    words = "at least two other users above 60% after 100, lower bound above 50%"
    return ClaimVerdict(words, ", ".join(good) or "none", len(good) >= 2)


def _retention(
    words: str,
    hostile: bool,
    figure: Callable[[Point], float],
    limit: float,
    form: str,
    seed: Callable[[Point], float] | None = None,
):
    """Return a claim that the worst figure of all cells (simulated user and arm) whose arm learns with the
    instant, the style or the full loop is at most `limit`. Cells with examples in the prompt are left out,
    because replies copy from examples without learning.

    hostile: True for the cells of hostile users, False for the cells of users with tastes
    figure: the function that returns the figure of a result
    form: the format of the figure in the verdict's text
    seed: the function that returns the figure of the worst seed, which the verdict also shows; None to leave
        it out
    """

    def alone(key: str) -> bool:
        return any(word in key for word in ("instant", "style", "full")) and "examples" not in key

    def look(found: Found) -> ClaimVerdict:
        learned = {k: v for k, v in found.items() if alone(k) and " against " not in k}
        cells = {k: v for k, v in learned.items() if (k.split(",")[0] in HOSTILE) == hostile}
        points = [(figure(p), k, p) for k, points in cells.items() for p in points]
        if not points:
            return ClaimVerdict(words, "-", None)
        value, key, _ = max(points, key=lambda x: x[0])
        beside = f"; worst seed of all {max(seed(p) for *_, p in points):{form}}" if seed else ""
        return ClaimVerdict(words, f"{value:{form}} ({key}{beside})", value <= limit)

    return look


def rate(point: Point) -> str:
    low, high = point.win_ci
    return f"{point.win_rate:.1%} ({low:.1%} to {high:.1%})"


_CLAIMS: list[Callable[[Found], ClaimVerdict]] = [
    _one("brevity after 30 ratings: at least 65%", "brevity, instant", 30, lambda p: p.win_rate >= 0.65),
    _one("brevity after 100 ratings: at least 85%", "brevity, instant", 100, lambda p: p.win_rate >= 0.85),
    _others,
    _one("context: better with the full loop", "context, full", 100, lambda p: p.win_ci[0] > 0.5),
    _one("shuffled ratings (brevity): 50% within the interval", "brevity, instant + shuffled", 100,
         lambda p: p.win_ci[0] <= 0.5 <= p.win_ci[1]),
    _one("shuffled ratings (lists): 50% within the interval", "lists, instant + shuffled", 100,
         lambda p: p.win_ci[0] <= 0.5 <= p.win_ci[1]),
    _one("a fifth of the ratings wrong: brevity at least 70%", "brevity, instant + 20% flipped", 100,
         lambda p: p.win_rate >= 0.7),
    _one("taste reversed after 100: recovered 40 ratings later", "brevity, instant + reversed at 100", 140,
         lambda p: p.win_ci[1] >= 0.5),
    _beats("full loop against the instant loop (brevity)", "brevity, full", "brevity, instant"),
    _beats("full loop against the instant loop (context)", "context, full", "context, instant"),
    _beats("instant + examples against examples", "brevity, instant + examples", "brevity, examples"),
    _retention("KL at most 0.1", False, lambda p: p.kl, 0.1, ".3f"),
    _retention("perplexity at most +2%", False, lambda p: p.ppl_change, 0.02, "+.2%"),
    _retention("distinct-2, mean of seeds: at most 5% lost", False, lambda p: 1 - p.variety, 0.05, ".1%",
               lambda p: 1 - p.variety_worst),
    _retention("hostile ratings: perplexity within 5%", True, lambda p: abs(p.ppl_change), 0.05, ".2%"),
    _retention("hostile ratings: KL at most 0.1", True, lambda p: p.kl, 0.1, ".3f"),
    _retention("hostile ratings: distinct-2, mean of seeds: at most 5% lost", True, lambda p: 1 - p.variety,
               0.05, ".1%", lambda p: 1 - p.variety_worst),
]  # fmt: skip
