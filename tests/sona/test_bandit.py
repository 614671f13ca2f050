"""The bandit: exact posteriors, honest probabilities, less regret than random choices."""

import numpy as np
import pytest

from ruvmlx.errors import RuvmlxError
from ruvmlx.sona.optional import bandit
from ruvmlx.sona.optional.bandit import NOISE, Regression


def states(rng, n, d) -> np.ndarray:
    return np.concatenate([np.ones((n, 1)), rng.standard_normal((n, d - 1))], axis=1)


@pytest.mark.parametrize("n,d", [(1, 4), (5, 9), (40, 7)])
def test_rank_one_updates_are_the_closed_form(n, d):
    rng = np.random.default_rng(n)
    prior = Regression.prior(d, 0.6)
    phi, r = states(rng, n, d), rng.uniform(0, 2, n)
    arm = Regression.prior(d, 0.6)
    for x, y in zip(phi, r, strict=True):
        arm.observe(x, y)
    precision = prior.precision + phi.T @ phi / NOISE**2
    mean = np.linalg.inv(precision) @ (prior.moment + phi.T @ r / NOISE**2)
    np.testing.assert_allclose(arm.precision, precision, rtol=1e-12)
    np.testing.assert_allclose(arm.mean, mean, rtol=1e-9)
    assert arm.count == n and arm.mean_reward == pytest.approx(r.mean())
    x = states(rng, 1, d)[0]
    expected, sd = arm.expects(x)
    assert expected == pytest.approx(x @ mean) and sd == pytest.approx(
        np.sqrt(x @ np.linalg.inv(precision) @ x)
    )


@pytest.mark.parametrize("reward", [np.nan, np.inf, -0.1, 2.1])
def test_what_is_no_reward_is_refused(reward):
    arm = Regression.prior(3, 0.5)
    before = (arm.precision.tobytes(), arm.moment.tobytes(), arm.count)
    with pytest.raises(RuvmlxError, match="a reward is from 0 to 2"):
        arm.observe(np.ones(3), reward)
    for bad in (np.array([1.0, np.nan, 0]), np.ones(4)):
        with pytest.raises(RuvmlxError, match="3 finite numbers"):
            arm.observe(bad, 1.0)
    assert (arm.precision.tobytes(), arm.moment.tobytes(), arm.count) == before


def test_drawing_an_arms_value_is_drawing_its_weights():
    """The slow twin: theta from the posterior, then phi . theta."""
    rng = np.random.default_rng(7)
    arms = [Regression.prior(5, mean) for mean in (0.6, 0.4, 0.4)]
    for i, x in enumerate(states(rng, 60, 5)):
        arms[i % 3].observe(x, rng.uniform(0, 2))
    x = states(rng, 1, 5)[0]
    fast = np.bincount(bandit.draws([a.expects(x) for a in arms], rng, 40_000), minlength=3) / 40_000
    thetas = [rng.multivariate_normal(a.mean, np.linalg.inv(a.precision), 40_000) for a in arms]
    slow = np.bincount(np.argmax([t @ x for t in thetas], axis=0), minlength=3) / 40_000
    np.testing.assert_allclose(fast, slow, atol=0.015)


def test_the_default_arm_is_preferred_at_first_and_the_same_seed_draws_the_same():
    arms = [Regression.prior(4, bandit.DEFAULT_MEAN), Regression.prior(4, bandit.OTHER_MEAN)]
    beliefs = [a.expects(np.array([1.0, 0, 0, 0])) for a in arms]
    index, best = bandit.choose(beliefs, np.random.default_rng(1))
    assert 0.65 < best[0] < 0.85 and best.sum() == pytest.approx(1)
    again, same = bandit.choose(beliefs, np.random.default_rng(1))
    assert again == index and (same == best).all()


def regret(rng, n, uniform) -> float:
    """Regret against a perfect choice: two kinds of question, each with an arm that the user likes 40 points
    more."""
    arms = [Regression.prior(4, bandit.DEFAULT_MEAN), Regression.prior(4, bandit.OTHER_MEAN)]
    lost = 0.0
    for _ in range(n):
        kind = rng.integers(2)
        phi = np.array([1.0, 2.0 * kind - 1, *0.3 * rng.standard_normal(2)])
        arm = rng.integers(2) if uniform else bandit.choose([a.expects(phi) for a in arms], rng)[0]
        liked = 0.7 if arm == kind else 0.3
        lost += 0.7 - liked
        arms[arm].observe(phi, float(rng.random() < liked))
    return lost / n


def test_regret_is_less_than_by_chance():
    """200 ratings, 12 users: a uniform choice loses 0.2 a reply."""
    found = [regret(np.random.default_rng(s), 200, False) for s in range(12)]
    chance = [regret(np.random.default_rng(s), 200, True) for s in range(12)]
    assert np.mean(chance) == pytest.approx(0.2, abs=0.02)
    assert np.mean(found) < 0.6 * np.mean(chance) and max(found) < min(chance)
