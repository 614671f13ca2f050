"""This module computes the weight of a rating by DRO (direct reward optimisation, arXiv 2405.19107). The
weight says how strongly a reply is made likelier (above 0) or less likely (below 0).

    w = clip(r - V(x) - tau * rho, -1, 1)        (the value, limited to the range from -1 to 1)

r: the rating as a reward, -1 to 1
V(x): the user's mean reward for replies to questions similar to the question x (reasoning_bank.py)
rho: the reply's log-ratio: its log-probability minus its log-probability in a fixed model (nats per token).
    The fixed model is the model with only the base LoRA in the instant loop (Trace.log_ratio), and the frozen
    model in the background loop.

Because of the term tau * rho, the weight becomes 0 at a finite log-ratio. So learning makes no reply
likelier, or less likely, without limit.
"""

from collections.abc import Sequence

import numpy as np

from ..errors import UsageError
from ..ratings import RATINGS

TAU = 0.25


def check_rating(rating: str) -> str:
    rating = str(rating).strip().lower()
    if rating not in RATINGS:
        raise UsageError(f"a rating is up, down or 1 to 5; got {rating!r}.")
    return rating


def reward(rating: str, stars: Sequence[int] | np.ndarray) -> float:
    """Return the reward r of a rating, in [-1, 1]: 1 for up and -1 for down. The r of a star rating is its
    mid-rank among the user's star ratings, scaled to the range from -1 to 1.

    The ranking starts with one imaginary rating of each number of stars. So the first rating of 5 stars has r
    = 1, and the first rating of 4 stars has r = 0.5. If a user always gives 5 stars, r of 5 stars is below 1.

    stars: [5], how many ratings have 1 star, 2 stars, ..., 5 stars; the caller decides whether this rating
        itself is among them
    """
    if rating in ("up", "down"):
        return 1.0 if rating == "up" else -1.0
    counts, at = [1 + int(n) for n in stars], int(rating) - 1
    rank = (sum(counts[:at]) + 0.5 * counts[at]) / sum(counts)
    # If the user has given no ratings yet, the mid-ranks of 1 star and of 5 stars are 0.1 and 0.9.
    return min(1.0, max(-1.0, 2.5 * (rank - 0.1) - 1))


def pair_weights(strength: float, better_ratio: float, worse_ratio: float) -> tuple[float, float]:
    """Return the weights of a preference: (w of the better reply, in [0, 1]; w of the worse reply, in [-1,
    0]). V(x) cancels, because both replies answer the same question.

    strength: the reward r of the preference; 1 for a clear preference
    better_ratio, worse_ratio: the log-ratios rho of the two replies
    """
    better, worse = strength - TAU * better_ratio, -strength - TAU * worse_ratio
    return float(np.clip(better, 0, 1)), float(np.clip(worse, -1, 0))


def dro_weight(rating: str, r: float, value: float, log_ratio: float) -> float:
    """Return the weight w of a rating, in [-1, 1]. w never contradicts the rating: w is at least 0 for up, 4
    and 5, and at most 0 for down, 1 and 2."""
    w = float(np.clip(r - value - TAU * log_ratio, -1, 1))
    if w != w:  # w is NaN; the later update of the weights refuses NaN
        return w
    if rating in ("up", "4", "5"):
        return max(0.0, w)
    if rating in ("down", "1", "2"):
        return min(0.0, w)
    return w
