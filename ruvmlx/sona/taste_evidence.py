"""This module computes the taste model's regression (taste.py): a Bayesian linear regression whose variances
the evidence p(y) chooses.
    y = X w + e,   w_k ~ N(0, a_k),   e_i ~ N(0, s / weight_i)
y are the stars of n ratings, X the columns of the rated replies, w the weights of the columns, a_k the prior
variances of the weights, e the noise, and s the noise variance. Then
    P = diag(1 / a) + X^T X / s        precision of w given y; X^T X, X^T y, y^T y are weighted sums
    log p(y) = -1/2 [n log(2 pi s) + sum log a + log |P| + (y^T y - b^T P^-1 b / s) / s],   b = X^T y

The formulas of P and log p(y) need only sums over ratings, so the time of a step in the search for variances
does not grow with the number of ratings.

Few measures of a text matter to one user. So the weights of measures do not have the prior N(0, a_k), but a
prior with a spike and a slab:
    w_k ~ chance_k N(0, SLAB) + (1 - chance_k) N(0, SPIKE)    (chance_k: the probability that k matters)

Expectation propagation finds a Gaussian near the posterior. Expectation propagation replaces the prior of
each w_k by a Gaussian (precision t_k, shift h_k). With this Gaussian, the mean and the variance of w_k are in
the end nearly the same as with the true prior (Hernandez-Lobato, Hernandez-Lobato & Suarez 2015).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

LEAST_NOISE = 1 / 12  # the minimum noise variance: the variance of the error if stars are rounded
USUAL_NOISE = 0.7  # the noise variance of ratings (squared stars) around which the prior is centred
INTERCEPT = 1.5  # the prior variance of the intercept
SLAB, SPIKE = 0.5, 0.001  # the prior variance of a weight that matters, and of a weight that does not matter
_ROUNDS = 60  # the maximum number of rounds of expectation propagation
_PART = 0.5  # the share of the way to the new Gaussians that each round goes
_SETTLED = 1e-2  # the rounds end after a round that changes every precision by less than this share
# The maximum number of ratings in one product of matrices. The work memory of OpenBLAS grows with this
# number, up to 2 MB for each thread at about 400 ratings. A server would never give this memory back.
_TOGETHER = 64
_GAIN = 1e-3  # the minimum gain of log-evidence of a step in the search for variances


def sums_of_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a^T b: the sums over R ratings of the products of each column of a and each column of b. a: [R,
    C]. b: [R, D]. Result: [C, D]"""
    total = a[:_TOGETHER].T @ b[:_TOGETHER]
    for at in range(_TOGETHER, len(a), _TOGETHER):
        total += a[at : at + _TOGETHER].T @ b[at : at + _TOGETHER]
    return total


@dataclass(frozen=True)
class Sums:
    """The sums over ratings that the regression needs.

    joint: [d + 1, d + 1], the weighted sums over ratings of the products of each two of d + 1 values: the
        ratings' d columns and, as the last value, y
    count: the sum of the ratings' weights
    """

    joint: np.ndarray
    count: float

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> "Sums":
        xy = np.column_stack([x, y])
        return cls(sums_of_products(xy * weight[:, None], xy), float(weight.sum()))

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
        """Return the prior variances a [1 + M + K] of the intercept's, the M measures' and the K selected
        columns' weights."""
        return np.array([INTERCEPT, *[self.base] * measures, *self.own])

    def scale_variance(self, which: int, factor: float) -> "Variances":
        """Return a copy of the variances in which one variance is multiplied by `factor`. which: 0 for
        `base`, 1 for `noise`, 2 + k for the variance of selected column k."""
        if which == 0:
            return replace(self, base=self.base * factor)
        if which == 1:
            return replace(self, noise=max(self.least, self.noise * factor))
        own = list(self.own)
        own[which - 2] *= factor
        return replace(self, own=tuple(own))


@dataclass(frozen=True)
class Posterior:
    """The posterior of the weights of the d columns: mean [d] and covariance [d, d]. noise: the noise
    variance s."""

    mean: np.ndarray
    covariance: np.ndarray
    noise: float

    @classmethod
    def of(cls, sums: Sums, prior: np.ndarray, noise: float) -> "Posterior":
        covariance = np.linalg.inv(np.diag(1 / prior) + sums.gram / noise)
        return cls(covariance @ sums.moment / noise, covariance, noise)

    @classmethod
    def sparse(cls, sums: Sums, prior: np.ndarray, chance: np.ndarray, noise: float) -> "Posterior":
        """Return the Gaussian posterior that expectation propagation finds.

        prior: [d], the prior variances of the weights without a spike and a slab
        chance: [d], the prior probability that each weight matters; NaN for a weight with the prior N(0,
            prior)
        """
        few = np.flatnonzero(~np.isnan(chance))
        gram, moment, chance = sums.gram / noise, sums.moment / noise, chance[few]
        precision, shift = 1 / prior, np.zeros(len(prior))
        precision[few] = 1 / (chance * SLAB)
        for _ in range(_ROUNDS):
            found = cls._with_sites(gram, moment, precision, shift, noise)
            mean, variance = found.mean[few], found.covariance.diagonal()[few]
            # Compute the distribution of each weight without its own Gaussian: precision and shift.
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
        """Return the predicted mean and variance [R] of y for R rows of columns x [R, d]. The variance
        includes the noise."""
        return x @ self.mean, self.noise + np.einsum("rd,rd->r", x @ self.covariance, x)


def _moments(centre: np.ndarray, variance: np.ndarray, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance of the product of N(centre, variance) and a spike-and-slab prior.
    chance: the prior probability of the slab."""
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
    """Return log p(y) of one set of ratings. prior: [d], the prior variances a. noise: the noise variance
    s."""
    return float(log_evidences(sums.joint, sums.count, prior, noise))


def log_evidences(
    joint: np.ndarray, count: np.ndarray | float, prior: np.ndarray, noise: float
) -> np.ndarray:
    """Return log p(y) of each of several sets of ratings: [...].

    joint: [..., d + 1, d + 1], the `Sums.joint` of each set
    count: [...], the sum of the ratings' weights of each set

    One Cholesky factorisation gives both terms of log p(y), the misfit and the determinant of P. In the
    factor of [[P, b / s], [b^T / s, y^T y / s]], the last corner is the square root of the misfit, and the
    rest is the factor of P.
    """
    both = joint / noise
    size = len(prior)
    diagonals = both.reshape(-1, (size + 1) ** 2)[:, :: size + 2]  # `diagonals` is a view
    diagonals[:, :size] += 1 / prior
    diagonals[:, size] += 1e-9  # this term keeps the last pivot positive if there are no ratings
    roots = np.linalg.cholesky(both).diagonal(axis1=-2, axis2=-1)
    log_det = 2 * np.log(roots[..., :-1]).sum(axis=-1) + np.log(prior).sum()
    return -0.5 * (count * math.log(2 * math.pi * noise) + log_det + roots[..., -1] ** 2)


def coordinate_ascent(
    variances: Variances, which: Sequence[int], score: Callable[[Variances], float], steps: Sequence[float]
) -> Variances:
    """Return variances whose score is at least that of the given variances. The search is a coordinate ascent
    over log2 of the variances.

    which: the numbers of the variances to change, as the argument `which` of `Variances.scale_variance`
    steps: the step sizes (log2), which are tried one after the other, the largest first
    """
    best = score(variances)
    for step in steps:
        for place in which:
            for factor in (2.0**step, 2.0**-step):
                while (value := score(moved := variances.scale_variance(place, factor))) > best + _GAIN:
                    variances, best = moved, value
    return variances


def hyperprior(variances: Variances, base: float, own: Sequence[float]) -> float:
    """Return the log-density of the variances under their prior, up to a constant. The prior is log-normal
    around the values `base`, USUAL_NOISE and `own`. A prior is necessary, because few ratings say little
    about variances.

    base, own: the centres of the prior of `variances.base` and `variances.own`
    """
    off = [(variances.base / base, 2.0), (variances.noise / USUAL_NOISE, 1.5)]
    off += [(a / usual, 1.0) for a, usual in zip(variances.own, own, strict=True)]
    return sum(-0.5 * (math.log2(ratio) / spread) ** 2 for ratio, spread in off)
