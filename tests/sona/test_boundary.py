"""Task boundaries: Welford against NumPy; changes are detected, with few false alarms."""

import numpy as np
import pytest

from ruvmlx.sona.task_boundary import BLOCK, WARM, Moments, boundaries

from .test_bank import unit


@pytest.mark.parametrize("n", [1, 2, 3, 51, 400])
def test_moments_are_numpys(n):
    values, moments = np.random.default_rng(n).normal(1e3, 0.5, n), Moments()
    for value in values:
        moments.add(value)
    assert moments.mean == pytest.approx(values.mean(), rel=1e-12)
    assert moments.deviation == pytest.approx(values.std(ddof=1) if n > 1 else 0.0, rel=1e-9)
    off = np.clip((values[:7] - values.mean()) / values.std(ddof=1), -3, 3) if n > 1 else np.zeros(1)
    want = off.mean() * np.sqrt(len(off)) if n >= WARM else 0.0
    assert moments.z(values[:7].tolist()) == pytest.approx(want, abs=1e-6)


def about(topic, n, seed, width=33) -> np.ndarray:
    """Questions around one of a few directions."""
    rng = np.random.default_rng(seed)
    return unit(np.eye(width)[topic] + rng.normal(0, 0.25, (n, width)))


def rewards(share, n, seed) -> list[float]:
    return np.where(np.random.default_rng(seed).random(n) < share, 1.0, -1.0).tolist()


def test_other_questions_are_a_new_task():
    questions = np.concatenate([about(0, 80, 1), about(1, 80, 2)])
    assert boundaries(rewards(0.5, 160, 3), questions) == [80]


def test_other_ratings_are_a_new_task():
    given = [1.0, 1.0, -1.0, 1.0] * 20 + [-1.0, -1.0, 1.0, -1.0] * 20
    assert boundaries(given, np.zeros((160, 5))) == [80]


def test_nothing_is_seen_before_it_is_warm():
    half = WARM // BLOCK * BLOCK // 2 + BLOCK // 2
    assert boundaries([1.0] * half + [-1.0] * half, np.zeros((2 * half, 5))) == []
    assert boundaries([], np.zeros((0, 5))) == []


def test_one_odd_question_or_ratings_that_do_not_differ_are_none():
    questions = about(0, 160, 1)
    questions[100] = -questions[100]
    assert boundaries([1.0] * 160, questions) == []


def test_of_the_same_again_few_blocks_are_taken_for_a_change():
    """2.3% of the blocks by chance on each of three sides; here of 40 users with 400 ratings each."""
    found = [len(boundaries(rewards(0.6, 400, seed), about(0, 400, seed + 1000))) for seed in range(40)]
    blocks = 40 * (400 - WARM) / BLOCK
    assert sum(found) / blocks < 0.1


ALIKE = [1.0, -1.0] * 40  # their mean is 0, their deviation nearly 1


def of_sixteen(ups: int) -> list[float]:
    return [1.0] * ups + [-1.0] * (16 - ups)


@pytest.mark.parametrize("ups,found", [(12, []), (13, [64]), (4, []), (3, [64])])
def test_two_standard_errors_are_a_change(ups, found):
    """12 of 16 are 1.98 of them, 13 are 2.48."""
    assert boundaries(ALIKE[:64] + of_sixteen(ups), np.zeros((80, 5))) == found


@pytest.mark.parametrize("before,found", [(16, []), (32, []), (48, []), (64, [64])])
def test_fifty_values_come_before_the_first_test(before, found):
    """Blocks have 16, so the first that is tested begins at 64."""
    assert boundaries(ALIKE[:before] + of_sixteen(16), np.zeros((before + 16, 5))) == found


def test_a_task_begins_with_the_block_that_ended_the_one_before():
    """The next task's blocks are counted from there: its end is a multiple of BLOCK later."""
    wave = [0.1, -0.1] * 32
    rewards = [value + w for value in (-1.0, 1.0, -1.0) for w in wave]
    assert boundaries(rewards, np.zeros((len(rewards), 3), np.float32)) == [64, 128]
