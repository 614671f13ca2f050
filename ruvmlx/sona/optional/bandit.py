"""Neural-linear Thompson sampling over a few arms (Riquelme, Tucker & Snoek 2018).

Each arm has a Bayesian linear regression of the reward on its features phi, with known noise:

    P <- P + phi phi^T / sigma^2        c <- c + phi r / sigma^2        mean = P^-1 c

The arm with the best draw from its posterior is chosen. The updates are exact and of rank one. P is stored,
not its inverse, so rounding errors do not grow. To take back a rating, the arm is fitted again to the other
ratings. The result is bit for bit as if the rating had never been given.
"""

from dataclasses import dataclass

import numpy as np

from ...errors import RuvmlxError

NOISE = 0.5  # sigma: the deviation of rewards that are 0 or 1 equally often
BIAS_SD, WEIGHT_SD = 0.2, 0.15  # prior deviations of an arm's bias and of each feature's weight
# Prior mean rewards: of the arm that is used without a router, and of the others.
DEFAULT_MEAN, OTHER_MEAN = 0.6, 0.4
MAX_REWARD = 2.0  # the largest reward: quality (0 to 1) * max(0, 2 - latency_ratio)
DRAWS = 2000


@dataclass
class Regression:
    """One arm. precision: [d, d]. moment: [d] = precision @ mean. count, total: of the rewards seen."""

    precision: np.ndarray
    moment: np.ndarray
    count: int = 0
    total: float = 0.0

    @classmethod
    def prior(cls, dimensions: int, mean: float) -> "Regression":
        """Return the prior of an arm with features [1, state]. The expected reward is `mean` at every
        state."""
        diagonal = np.full(dimensions, WEIGHT_SD**-2)
        diagonal[0] = BIAS_SD**-2
        moment = np.zeros(dimensions)
        moment[0] = mean * diagonal[0]
        return cls(np.diag(diagonal), moment)

    def observe(self, phi: np.ndarray, reward: float) -> None:
        """Add one rating. phi: [d]. Raises RuvmlxError, and changes nothing, if the reward or the state is
        invalid."""
        if not 0 <= reward <= MAX_REWARD:  # this is false for NaN too
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
        """Posterior mean of the weights: [d]."""
        return np.linalg.solve(self.precision, self.moment)

    @property
    def mean_reward(self) -> float | None:
        return self.total / self.count if self.count else None

    def expects(self, phi: np.ndarray) -> tuple[float, float]:
        """Return the posterior mean and standard deviation of the reward at a state."""
        solved = np.linalg.solve(self.precision, np.stack([self.moment, phi], axis=1))
        return float(phi @ solved[:, 0]), float(np.sqrt(max(0.0, float(phi @ solved[:, 1]))))


def draws(beliefs: list[tuple[float, float]], rng: np.random.Generator, n: int = DRAWS) -> np.ndarray:
    """Return the index of the best arm in each of n draws: [n].

    beliefs: (mean, standard deviation) of the reward per arm. Weights are normal, so rewards are normal, and
        arms are independent. So drawing rewards is the same as drawing weights, which the slow twin in the
        tests does.
    """
    mean, sd = np.array(beliefs).T
    return np.argmax(mean + sd * rng.standard_normal((n, len(beliefs))), axis=1)


def choose(beliefs: list[tuple[float, float]], rng: np.random.Generator) -> tuple[int, np.ndarray]:
    """Return the best arm in the first draw, and each arm's share of all draws, which is its probability of
    being best."""
    best = draws(beliefs, rng)
    return int(best[0]), np.bincount(best, minlength=len(beliefs)) / len(best)
