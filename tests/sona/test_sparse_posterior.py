"""The posterior under a spike and a slab, by expectation propagation; its slow twin takes all subsets."""

import itertools

import numpy as np
import pytest

from ruvmlx.sona.taste_evidence import SLAB, SPIKE, Posterior, Sums

NOISE = 0.6


def data(rows: int, columns: int, seed: int, weights: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns))
    return x, x @ [weights.get(k, 0.0) for k in range(columns)] + np.sqrt(NOISE) * rng.standard_normal(rows)


def by_subsets(x: np.ndarray, y: np.ndarray, prior: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """Return the exact mean: the mean of all subsets of weights that have the slab, by their evidence."""
    few, total, mean = np.flatnonzero(~np.isnan(chance)), 0.0, np.zeros(x.shape[1])
    for chosen in itertools.product((False, True), repeat=len(few)):
        variances = prior.copy()
        variances[few] = np.where(chosen, SLAB, SPIKE)
        covariance = (x * variances) @ x.T + NOISE * np.eye(len(y))
        likely = -0.5 * (np.linalg.slogdet(covariance)[1] + y @ np.linalg.solve(covariance, y))
        weight = np.exp(likely) * np.prod(np.where(chosen, chance[few], 1 - chance[few]))
        total, mean = total + weight, mean + weight * variances * (x.T @ np.linalg.solve(covariance, y))
    return mean / total


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (5, 7), (12, 3), (30, 9)])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_is_near_that_over_all_subsets(rows, columns, seed):
    x, y = data(rows, columns, seed, {1: 1.0})
    prior, chance = np.full(columns, 0.5), np.full(columns, 0.1)
    chance[0] = np.nan  # a weight with an ordinary prior
    found = Posterior.sparse(Sums.of(x, y, np.ones(rows)), prior, chance, NOISE).mean
    np.testing.assert_allclose(found, by_subsets(x, y, prior, chance), atol=0.06)


def test_a_weight_that_matters_is_kept_and_others_are_near_zero():
    x, y = data(30, 40, 4, {3: 1.0})
    sums = Sums.of(x, y, np.ones(30))
    sparse = Posterior.sparse(sums, np.full(40, SLAB), np.full(40, 0.1), NOISE).mean
    dense = Posterior.of(sums, np.full(40, 1 / 40), NOISE).mean
    assert (
        sparse[3] > 0.7 > dense[3]
        and abs(np.delete(sparse, 3)).mean() < 0.5 * abs(np.delete(dense, 3)).mean()
    )
