"""Bayesian linear regression whose variances are chosen by the evidence.

    y = X w + e,   w_k ~ N(0, a_k),   e_i ~ N(0, s / weight_i)

    P = diag(1 / a) + X^T X / s        precision of w given y; X^T X, X^T y, y^T y are weighted sums
    log p(y) = -1/2 [n log(2 pi s) + sum log a + log |P| + (y^T y - b^T P^-1 b / s) / s],   b = X^T y

Only sums over ratings appear, so the cost of a step does not grow with the number of ratings.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

LEAST_NOISE = 1 / 12  # the variance of a number that was rounded to a whole one, as stars are
USUAL_NOISE = 0.7
_GAIN = 1e-3  # of log-evidence: a smaller gain ends the search


@dataclass(frozen=True)
class Sums:
    """joint: [d + 1, d + 1], sums of products of the d columns and, last, of y. count: the sum of weights."""

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
        """X^T X [d, d]"""
        return self.joint[:-1, :-1]

    @property
    def moment(self) -> np.ndarray:
        """X^T y [d]"""
        return self.joint[:-1, -1]


@dataclass(frozen=True)
class Variances:
    """The variances of the model.

    base: of the weight of each measure
    noise: s, never below `least`
    own: [K], a of the selected columns
    intercept: a of the first column
    """

    base: float
    noise: float
    own: tuple[float, ...] = ()
    least: float = LEAST_NOISE
    intercept: float = 1.5

    def prior(self, measures: int) -> np.ndarray:
        """a [1 + M + K]"""
        return np.array([self.intercept, *[self.base] * measures, *self.own])

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
    """mean [d] and covariance [d, d] of the weights; noise: s."""

    mean: np.ndarray
    covariance: np.ndarray
    noise: float

    @classmethod
    def of(cls, sums: Sums, prior: np.ndarray, noise: float) -> "Posterior":
        covariance = np.linalg.inv(np.diag(1 / prior) + sums.gram / noise)
        return cls(covariance @ sums.moment / noise, covariance, noise)

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x [R, d] -> mean and variance [R] of y, with the noise."""
        return x @ self.mean, self.noise + np.einsum("rd,rd->r", x @ self.covariance, x)


def log_evidence(sums: Sums, prior: np.ndarray, noise: float) -> float:
    """log p(y) for the prior variances a [d] and the noise variance s."""
    return float(log_evidences(sums.joint, sums.count, prior, noise))


def log_evidences(
    joint: np.ndarray, count: np.ndarray | float, prior: np.ndarray, noise: float
) -> np.ndarray:
    """Return the same for several sets of ratings: joint [..., d + 1, d + 1], count [...].

    One factorisation gives both terms. In the root of [[P, b / s], [b^T / s, y^T y / s]], the last corner is
    the root of the misfit, and the rest is that of P.
    """
    both = joint / noise
    size = len(prior)
    diagonals = both.reshape(-1, (size + 1) ** 2)[:, :: size + 2]  # a view
    diagonals[:, :size] += 1 / prior
    diagonals[:, size] += 1e-9  # without any ratings the corner must stay positive
    roots = np.linalg.cholesky(both).diagonal(axis1=-2, axis2=-1)
    log_det = 2 * np.log(roots[..., :-1]).sum(axis=-1) + np.log(prior).sum()
    return -0.5 * (count * math.log(2 * math.pi * noise) + log_det + roots[..., -1] ** 2)


def coordinate_ascent(
    variances: Variances, which: Sequence[int], score: Callable[[Variances], float], steps: Sequence[float]
) -> Variances:
    """Coordinate ascent over log2 of the variances that `which` names (as in `scale_variance`). The steps get
    smaller."""
    best = score(variances)
    for step in steps:
        for place in which:
            for factor in (2.0**step, 2.0**-step):
                while (value := score(moved := variances.scale_variance(place, factor))) > best + _GAIN:
                    variances, best = moved, value
    return variances


def hyperprior(variances: Variances, base: float, own: Sequence[float]) -> float:
    """Log-normal around the usual values, because few ratings say little about variances."""
    off = [(variances.base / base, 2.0), (variances.noise / USUAL_NOISE, 1.5)]
    off += [(a / usual, 1.0) for a, usual in zip(variances.own, own, strict=True)]
    return sum(-0.5 * (math.log2(ratio) / spread) ** 2 for ratio, spread in off)
