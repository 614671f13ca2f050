import numpy as np
import pytest
from ruvmlx.apps.prove.statistics import win_interval, win_rate


def test_win_rate_counts_a_tie_as_half():
    assert win_rate(np.array([[5, 3, 1, 2]]), np.array([[1, 3, 4, 2]])) == 0.5
    assert win_rate(np.array([[5, 5]]), np.array([[1, 5]])) == 0.75


def test_interval_covers_the_truth_and_shrinks_with_more_prompts():
    """Of 200 experiments with a true win-rate of 0.6, about 95 in 100 intervals hold it."""
    rng = np.random.default_rng(0)
    held, widths = 0, {}
    for prompts in (25, 100):
        for _ in range(200):
            wins = rng.random((1, prompts)) < 0.6
            low, high = win_interval(wins.astype(int), 1 - wins.astype(int))
            held += low <= 0.6 <= high
            widths.setdefault(prompts, []).append(high - low)
    assert 0.9 <= held / 400 <= 0.99
    assert np.mean(widths[100]) == pytest.approx(np.mean(widths[25]) / 2, rel=0.1)


def test_seeds_of_one_prompt_are_no_independent_evidence():
    rng = np.random.default_rng(1)
    wins = (rng.random((1, 40)) < 0.6).astype(int)
    one = win_interval(wins, 1 - wins)
    copied = win_interval(np.repeat(wins, 5, axis=0), 1 - np.repeat(wins, 5, axis=0))
    assert copied == one
