"""This module computes a Bayesian linear regression whose variances are chosen by the evidence p(y).

    y = X w + e,   w_k ~ N(0, a_k),   e_i ~ N(0, s / weight_i)

    P = diag(1 / a) + X^T X / s        precision of w given y; X^T X, X^T y, y^T y are weighted sums
    log p(y) = -1/2 [n log(2 pi s) + sum log a + log |P| + (y^T y - b^T P^-1 b / s) / s],   b = X^T y

The formulas need only sums over ratings, so the time of a step does not grow with the number of ratings.

Few measures matter to one user. So the weights of measures get another prior, a spike and a slab,

    w_k ~ chance_k N(0, SLAB) + (1 - chance_k) N(0, SPIKE)

Expectation propagation finds a Gaussian near the posterior. It replaces each prior by a Gaussian (precision
t_k, shift h_k), and chooses this Gaussian so that the mean and variance of w_k would stay the same with the
true prior. (Hernandez-Lobato, Hernandez-Lobato & Suarez 2015)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

LEAST_NOISE = 1 / 12  # the variance of a rounding error; stars are rounded to whole numbers
USUAL_NOISE = 0.7
INTERCEPT = 1.5  # the variance of the intercept
SLAB, SPIKE = 0.5, 0.001  # the prior variance of a weight that matters, and of a weight that does not matter
_ROUNDS = 60  # the maximum number of rounds of expectation propagation
_PART = 0.5  # each round goes this share of the way to the new Gaussians
_SETTLED = 1e-2  # the rounds end after a round with a smaller relative change of every precision
_GAIN = 1e-3  # a smaller gain of log-evidence ends the search for variances


@dataclass(frozen=True)
class Sums:
    """The sums over ratings that the regression needs. joint: [d + 1, d + 1], the weighted sums of the
    products of all pairs of the d columns and y (the last). count: the sum of the ratings' weights."""

    joint: np.ndarray
    count: float

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> "Sums":
        xy = np.column_stack([x, y])
        return cls((xy * weight[:, None]).T @ xy, float(weight.sum()))

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.joint + other.joint, self.count + other.count)

    @property
    def gram(self) -> np.ndarray:
        """The matrix X^T X [d, d]."""
        return self.joint[:-1, :-1]

    @property
    def moment(self) -> np.ndarray:
        """The vector X^T y [d]."""
        return self.joint[:-1, -1]


@dataclass(frozen=True)
class Variances:
    """The prior variances and the noise variance of the regression.

    base: the prior variance of the weight of each measure
    noise: the noise variance s, never below `least`
    own: [K], the prior variances a of the weights of the selected columns
    """

    base: float
    noise: float
    own: tuple[float, ...] = ()
    least: float = LEAST_NOISE

    def prior(self, measures: int) -> np.ndarray:
        """Return the prior variances a [1 + M + K] of the intercept, the measures and the selected
        columns."""
        return np.array([INTERCEPT, *[self.base] * measures, *self.own])

    def scale_variance(self, which: int, factor: float) -> "Variances":
        """Return the variances with one of them times a factor. which: 0: base, 1: noise, from 2 on: the
        selected columns."""
        if which == 0:
            return replace(self, base=self.base * factor)
        if which == 1:
            return replace(self, noise=max(self.least, self.noise * factor))
        own = list(self.own)
        own[which - 2] *= factor
        return replace(self, own=tuple(own))


@dataclass(frozen=True)
class Posterior:
    """The posterior of the weights: mean [d] and covariance [d, d]. noise: the noise variance s."""

    mean: np.ndarray
    covariance: np.ndarray
    noise: float

    @classmethod
    def of(cls, sums: Sums, prior: np.ndarray, noise: float) -> "Posterior":
        covariance = np.linalg.inv(np.diag(1 / prior) + sums.gram / noise)
        return cls(covariance @ sums.moment / noise, covariance, noise)

    @classmethod
    def sparse(cls, sums: Sums, prior: np.ndarray, chance: np.ndarray, noise: float) -> "Posterior":
        """Return the Gaussian posterior that expectation propagation finds. prior: [d], the prior variances.
        chance: [d], the prior probability that a weight matters; NaN if the weight's prior is N(0, prior).
        """
        few = np.flatnonzero(~np.isnan(chance))
        gram, moment, chance = sums.gram / noise, sums.moment / noise, chance[few]
        precision, shift = 1 / prior, np.zeros(len(prior))
        precision[few] = 1 / (chance * SLAB)
        for _ in range(_ROUNDS):
            found = cls._with_sites(gram, moment, precision, shift, noise)
            mean, variance = found.mean[few], found.covariance.diagonal()[few]
            # The distribution of the weight without its own Gaussian.
            rest = np.maximum(1 / variance - precision[few], 1e-6)
            drawn_to = mean / variance - shift[few]
            right_mean, right_variance = _moments(drawn_to / rest, 1 / rest, chance)
            wanted = np.clip(1 / right_variance - rest, 1e-3, 1e6)
            moved = precision[few] * (wanted / precision[few]) ** _PART
            shift[few] += _PART * (right_mean * (rest + wanted) - drawn_to - shift[few])
            settled = np.max(abs(moved / precision[few] - 1)) < _SETTLED
            precision[few] = moved
            if settled:
                break
        return cls._with_sites(gram, moment, precision, shift, noise)

    @classmethod
    def _with_sites(
        cls, gram: np.ndarray, moment: np.ndarray, precision: np.ndarray, shift: np.ndarray, noise: float
    ) -> "Posterior":
        covariance = np.linalg.inv(np.diag(precision) + gram)
        return cls(covariance @ (moment + shift), covariance, noise)

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and variance [R] of y for rows x [R, d]. The variance includes the noise."""
        return x @ self.mean, self.noise + np.einsum("rd,rd->r", x @ self.covariance, x)


def _moments(centre: np.ndarray, variance: np.ndarray, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of N(centre, variance) times a spike and a slab."""
    parts = []
    for prior, share in ((SLAB, chance), (SPIKE, 1 - chance)):
        spread = prior + variance
        likely = np.log(share) - 0.5 * (np.log(spread) + centre * centre / spread)
        parts.append((likely, centre * prior / spread, prior * variance / spread))
    (slab, mean, left), (spike, small, little) = parts
    share = 1 / (1 + np.exp(np.clip(spike - slab, -500, 500)))
    first = share * mean + (1 - share) * small
    second = share * (left + mean * mean) + (1 - share) * (little + small * small)
    return first, second - first * first


def log_evidence(sums: Sums, prior: np.ndarray, noise: float) -> float:
    """Return log p(y) for the prior variances a [d] and the noise variance s."""
    return float(log_evidences(sums.joint, sums.count, prior, noise))


def log_evidences(
    joint: np.ndarray, count: np.ndarray | float, prior: np.ndarray, noise: float
) -> np.ndarray:
    """Return log p(y) for several sets of ratings. joint: [..., d + 1, d + 1], the `Sums.joint` of each set.
    count: [...], the number of ratings of each set.

    One Cholesky factorisation gives both terms. In the factor of [[P, b / s], [b^T / s, y^T y / s]], the last
    corner is the square root of the misfit, and the rest is the factor of P.
    """
    both = joint / noise
    size = len(prior)
    diagonals = both.reshape(-1, (size + 1) ** 2)[:, :: size + 2]  # `diagonals` is a view
    diagonals[:, :size] += 1 / prior
    diagonals[:, size] += 1e-9  # keeps the corner positive if there are no ratings
    roots = np.linalg.cholesky(both).diagonal(axis1=-2, axis2=-1)
    log_det = 2 * np.log(roots[..., :-1]).sum(axis=-1) + np.log(prior).sum()
    return -0.5 * (count * math.log(2 * math.pi * noise) + log_det + roots[..., -1] ** 2)


def coordinate_ascent(
    variances: Variances, which: Sequence[int], score: Callable[[Variances], float], steps: Sequence[float]
) -> Variances:
    """Find better variances by coordinate ascent over log2 of the variances that `which` names (as in
    `scale_variance`). The steps get smaller."""
    best = score(variances)
    for step in steps:
        for place in which:
            for factor in (2.0**step, 2.0**-step):
                while (value := score(moved := variances.scale_variance(place, factor))) > best + _GAIN:
                    variances, best = moved, value
    return variances


def hyperprior(variances: Variances, base: float, own: Sequence[float]) -> float:
    """Return the log-density of the variances: log-normal around the usual values, because few ratings say
    little about variances."""
    off = [(variances.base / base, 2.0), (variances.noise / USUAL_NOISE, 1.5)]
    off += [(a / usual, 1.0) for a, usual in zip(variances.own, own, strict=True)]
    return sum(-0.5 * (math.log2(ratio) / spread) ** 2 for ratio, spread in off)
