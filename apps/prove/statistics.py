"""This module compares the scores (stars) of the learned model's and the original model's replies to the same
prompts. The module computes how often the learned model's reply is better."""

import numpy as np

RESAMPLES = 2000  # the number of samples that a bootstrap draws


def win_rate(new: np.ndarray, old: np.ndarray) -> float:
    """Return the share of pairs in which the score in `new` is higher than the score in `old`. A tie is half
    a win. Both arrays have the same shape."""
    return float(np.mean((new > old) + 0.5 * (new == old)))


def win_interval(new: np.ndarray, old: np.ndarray) -> tuple[float, float]:
    """Return the 95% confidence interval of the win-rate, by a cluster bootstrap.

    Replies to one prompt are similar, so the bootstrap resamples whole prompts, with the replies for all
    seeds (Cameron, Gelbach & Miller 2008).

    new, old: [seeds, prompts], the scores of the learned and of the original model's replies
    """
    return mean_interval(((new > old) + 0.5 * (new == old)).mean(axis=0))


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean of n values [n], by a bootstrap."""
    rng = np.random.default_rng(0)
    drawn = values[rng.integers(0, values.size, (RESAMPLES, values.size))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def judged_wins(score: np.ndarray, stars: np.ndarray) -> float:
    """Return how often the reply with the highest predicted score has more stars than a random reply to the
    same question (this reply included). A tie is half a win.

    score, stars: [questions, replies], the predicted scores and the stars that the user would give
    """
    picked = np.take_along_axis(stars, score.argmax(axis=1)[:, None], axis=1)
    return win_rate(np.broadcast_to(picked, stars.shape), stars)
