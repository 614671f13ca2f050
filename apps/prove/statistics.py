"""Paired comparison: how often is the learned model's reply better?"""

import numpy as np

RESAMPLES = 2000


def win_rate(new: np.ndarray, old: np.ndarray) -> float:
    """Share of pairs in which `new` scores higher; a tie is half a win. Arrays of one shape."""
    return float(np.mean((new > old) + 0.5 * (new == old)))


def win_interval(new: np.ndarray, old: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% interval of the win-rate by a cluster bootstrap.  new, old: [seeds, prompts] scores.

    Replies to one prompt are alike, so whole prompts are resampled, with all of their seeds
    (Cameron, Gelbach & Miller 2008).
    """
    wins = ((new > old) + 0.5 * (new == old)).mean(axis=0)
    rng = np.random.default_rng(seed)
    drawn = wins[rng.integers(0, wins.size, (RESAMPLES, wins.size))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)
