"""The slow twin of the reward of a rating (ruvmlx/sona/objective.py)."""

import numpy as np


def reward_ref(rating: str, history) -> float:
    """The reward from the list of all ratings: the mid-rank of the stars, scaled to -1..1."""
    if rating in ("up", "down"):
        return 1.0 if rating == "up" else -1.0
    stars = np.array([1, 2, 3, 4, 5] + [int(h) for h in history if h.isdigit()])
    star = int(rating)
    rank = (np.sum(stars < star) + 0.5 * np.sum(stars == star)) / stars.size
    low, high = 0.1, 0.9  # the mid-ranks of 1 star and of 5 stars if there are no ratings yet
    return float(np.clip(2 * (rank - low) / (high - low) - 1, -1, 1))
