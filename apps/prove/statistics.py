"""This module compares paired scores: how often the learned model's reply is better."""

import numpy as np

RESAMPLES = 2000  # the number of bootstrap samples


def win_rate(new: np.ndarray, old: np.ndarray) -> float:
    """Return the share of pairs in which `new` has the higher score. A tie is half a win. Both arrays have
    the same shape."""
    return float(np.mean((new > old) + 0.5 * (new == old)))


def win_interval(new: np.ndarray, old: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95% interval of the win-rate by a cluster bootstrap. new, old: scores [seeds, prompts].

    Replies to one prompt are similar, so the bootstrap resamples whole prompts, with all of their seeds
    (Cameron, Gelbach & Miller 2008).
    """
    return mean_interval(((new > old) + 0.5 * (new == old)).mean(axis=0), seed)


def mean_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95% interval of the mean of n values [n], by a bootstrap."""
    rng = np.random.default_rng(seed)
    drawn = values[rng.integers(0, values.size, (RESAMPLES, values.size))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def judged_wins(score: np.ndarray, stars: np.ndarray) -> float:
    """Return how often the reply with the highest score has more stars than a random reply to the same
    question. A tie is half a win. score, stars: [questions, replies]."""
    picked = np.take_along_axis(stars, score.argmax(axis=1)[:, None], axis=1)
    return win_rate(np.broadcast_to(picked, stars.shape), stars)
