"""This module joins the results of trials (trial.py) over all seeds, and formats the results as the command
`prove` prints them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .statistics import win_interval, win_rate
from .trial import Checkpoint


@dataclass(frozen=True)
class Point:
    """The results of all seeds after a certain number of ratings.

    score, score_base: the mean stars of the learned model's and of the frozen (original) model's replies to
        held-out prompts
    win_rate: the share of pairs in which the learned model's reply has more stars; a tie is half a win
    win_ci: the 95% interval of the win-rate
    kl, ppl_change: the largest KL (nats per token) and the largest relative change of perplexity of all
        seeds, on neutral text
    variety: the distinct-2 of the learned model's replies, divided by the frozen model's; the mean of the
        seeds
    variety_worst: the variety of the worst seed (the sampling error of one seed is about 1%)
    best_rate: the win-rate of the replies that the taste model picks; None if the taste model does not pick
    """

    ratings: int
    score: float
    score_base: float
    win_rate: float
    win_ci: tuple[float, float]
    kl: float
    ppl_change: float
    mean_tokens: float
    mean_tokens_base: float
    variety: float
    variety_worst: float
    sample: str
    best_rate: float | None = None


def join_trials(trials: Sequence[Sequence[Checkpoint]]) -> list[Point]:
    """Return one Point for each number of ratings. A Point summarises the checkpoints of all seeds."""
    return [_point(list(seeds)) for seeds in zip(*trials, strict=True)]


def _point(seeds: list[Checkpoint]) -> Point:
    new, old = (np.stack([getattr(c, name) for c in seeds]) for name in ("scores", "base_scores"))
    low, high = win_interval(new, old)
    picked = [c.best_scores for c in seeds if c.best_scores is not None]
    return Point(
        ratings=seeds[0].ratings,
        score=round(float(new.mean()), 3),
        score_base=round(float(old.mean()), 3),
        win_rate=round(win_rate(new, old), 3),
        win_ci=(round(low, 3), round(high, 3)),
        kl=round(max(c.kl for c in seeds), 4),
        ppl_change=round(max(c.ppl_change for c in seeds), 4),
        mean_tokens=round(float(np.mean([c.mean_tokens for c in seeds])), 1),
        mean_tokens_base=round(float(np.mean([c.mean_tokens_base for c in seeds])), 1),
        variety=round(float(np.mean([c.variety for c in seeds])), 3),
        variety_worst=round(min(c.variety for c in seeds), 3),
        sample=seeds[0].sample,
        best_rate=round(win_rate(np.stack(picked), old), 3) if len(picked) == len(seeds) else None,
    )


def verdict(point: Point) -> str:
    """Return a sentence that says whether the ratings helped. The ratings helped if the whole interval of the
    win-rate is above 50%. They did harm if the whole interval is below 50%."""
    low, high = point.win_ci
    ratings = "1 rating" if point.ratings == 1 else f"{point.ratings} ratings"
    between = f"{point.win_rate:.0%} of the comparisons, {low:.0%} to {high:.0%} with 95% probability"
    if low > 0.5:
        return f"After {ratings}, replies are better than the original model's in {between}."
    if high < 0.5:
        return f"After {ratings}, replies are worse than the original model's: better only in {between}."
    return (
        f"After {ratings}, this run cannot tell whether replies are better than the original model's: "
        f"better in {between}. 50% is chance."
    )


def row(point: Point) -> tuple[str, ...]:
    """Return a row of the table that `prove` prints: ratings, stars before and after, win-rate and its
    interval, KL, perplexity, and tokens before and after."""
    low, high = point.win_ci
    return (
        str(point.ratings),
        f"{point.score_base:.2f} -> {point.score:.2f}",
        f"{point.win_rate:.0%}",
        f"{low:.0%} and {high:.0%}",
        f"{point.kl:.3f}",
        f"{point.ppl_change:+.1%}",
        f"{point.mean_tokens_base:.0f} -> {point.mean_tokens:.0f}",
    )
