"""This module chooses between a few arms by neural-linear Thompson sampling (Riquelme, Tucker & Snoek 2018).
An arm is a way to generate a reply (router.py).

Each arm has a Bayesian linear regression of the reward r on the arm's features phi, with noise of a known
standard deviation sigma. P is the precision matrix of the regression's weights, and c is P times their mean.
A rating updates P and c:
    P <- P + phi phi^T / sigma^2        c <- c + phi r / sigma^2        mean = P^-1 c

For each arm, an expected reward is drawn from the posterior, and the arm with the largest drawn reward is
chosen. Each update of P is exact and of rank one. P is stored instead of its inverse, so that rounding errors
do not grow. To take back a rating, the router fits the arm again to the other ratings. The arm's regression
is then bit for bit the same as if the user had never given the rating.
"""

from dataclasses import dataclass

import numpy as np

from ...errors import RuvmlxError

NOISE = 0.5  # sigma: the standard deviation of rewards that are equally often 0 and 1
BIAS_SD, WEIGHT_SD = 0.2, 0.15  # prior standard deviations of an arm's bias and of each feature's weight
# The prior mean rewards: of the arm that the runtime uses without a router, and of the other arms.
DEFAULT_MEAN, OTHER_MEAN = 0.6, 0.4
MAX_REWARD = 2.0  # the largest reward: quality (0 to 1) * max(0, 2 - latency_ratio)
DRAWS = 2000  # the number of draws that estimate each arm's probability of being the best arm


@dataclass
class Regression:
    """The Bayesian linear regression of one arm with d features.

    precision: [d, d], the matrix P of the module's docstring; moment: [d], the vector c (precision @ mean)
    count, total: the number and the sum of the arm's rewards so far
    """

    precision: np.ndarray
    moment: np.ndarray
    count: int = 0
    total: float = 0.0

    @classmethod
    def prior(cls, dimensions: int, mean: float, weight_sd: float = WEIGHT_SD) -> "Regression":
        """Return the prior of an arm with the features [1, state of the conversation]. The expected reward of
        the prior is `mean` for every state. weight_sd: the standard deviation of each feature's weight."""
        diagonal = np.full(dimensions, weight_sd**-2)
        diagonal[0] = BIAS_SD**-2
        moment = np.zeros(dimensions)
        moment[0] = mean * diagonal[0]
        return cls(np.diag(diagonal), moment)

    def observe(self, phi: np.ndarray, reward: float) -> None:
        """Add the reward of one rating. phi: [d], the features of the rated reply's conversation. Raises
        RuvmlxError, and changes nothing, if the reward or a feature is invalid."""
        if not 0 <= reward <= MAX_REWARD:  # NaN is refused here, too
            raise RuvmlxError(f"a reward is from 0 to {MAX_REWARD:g}; got {reward}. The router is unchanged.")
        if phi.shape != self.moment.shape or not np.isfinite(phi).all():
            raise RuvmlxError(
                f"a state is {len(self.moment)} finite numbers, got {phi.shape}. The router is unchanged."
            )
        self.precision += np.outer(phi, phi) / NOISE**2
        self.moment += phi * (reward / NOISE**2)
        self.count += 1
        self.total += reward

    @property
    def mean(self) -> np.ndarray:
        """The posterior mean of the regression's weights: [d]."""
        return np.linalg.solve(self.precision, self.moment)

    @property
    def mean_reward(self) -> float | None:
        return self.total / self.count if self.count else None

    def expects(self, phi: np.ndarray) -> tuple[float, float]:
        """Return the posterior mean and standard deviation of the expected reward (without the noise). phi:
        [d], the features of the conversation."""
        solved = np.linalg.solve(self.precision, np.stack([self.moment, phi], axis=1))
        return float(phi @ solved[:, 0]), float(np.sqrt(max(0.0, float(phi @ solved[:, 1]))))


def draws(beliefs: list[tuple[float, float]], rng: np.random.Generator, n: int = DRAWS) -> np.ndarray:
    """Draw an expected reward for each arm, n times. Return the index of the arm with the largest drawn
    reward in each draw: [n].

    beliefs: (mean, standard deviation) of the expected reward of each arm. The regressions' weights have
        normal distributions, so the rewards have normal distributions, too. The arms are independent. So
        drawn rewards have the same distribution as rewards from drawn weights; the slow reference in the
        tests draws weights.
    """
    mean, sd = np.array(beliefs).T
    return np.argmax(mean + sd * rng.standard_normal((n, len(beliefs))), axis=1)


def choose(
    beliefs: list[tuple[float, float]], rng: np.random.Generator, explore: float = 1.0
) -> tuple[int, np.ndarray]:
    """Return the arm that is best in one draw. Also return, for each arm, the share of draws in which the arm
    is best; this share estimates the probability that the arm is the best arm.

    explore: a factor of the standard deviations of the one draw; below 1, an arm that seems worse is tried
        less often than with the probability that it is the best arm
    """
    best = draws(beliefs, rng)
    shares = np.bincount(best, minlength=len(beliefs)) / len(best)
    if explore == 1.0:
        return int(best[0]), shares
    return int(draws([(mean, explore * sd) for mean, sd in beliefs], rng, 1)[0]), shares
