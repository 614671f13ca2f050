"""Two tasks on a random model: with the penalty, learning the second costs less of the first."""

from dataclasses import replace

import numpy as np

from ruvmlx.sona.background import TrainingSettings

from . import three_tastes
from .ewc_sweep import FOOD, Sweep, sweep

SETTINGS = TrainingSettings(steps=12, lr=2e-3, rank=3)


def test_the_second_task_costs_less_of_the_first(tiny):
    """Other letters are wanted: what the penalty keeps of the first task, the second one pays for."""
    questions = [q for q, _ in FOOD]
    first, second = ([(q, letters[i % 4]) for i, q in enumerate(questions)] for letters in ("ABCD", "1234"))
    one = Sweep(tiny, SETTINGS, first, second)
    start = one.fresh(0)
    trained = one.train(start, one.first, None, [], seed=0)
    anchor = one.anchor(trained, one.first)
    learned = one.evaluate(trained)
    assert learned.first < one.evaluate(start).first - 0.3
    lost, gained = [], []
    for strength in (0.0, 3e2, 3e4):
        one.settings = replace(SETTINGS, ewc=strength)
        found = one.evaluate(one.train(trained, one.second, None, [anchor], seed=1))
        lost.append(found.first - learned.first)
        gained.append(learned.second - found.second)
    assert lost[0] > 0.1 and lost[0] > lost[1] > lost[2], (lost, gained)
    assert gained[0] > gained[1] > 0.5 * gained[0], (lost, gained)


def test_the_sweep_says_what_it_found(tiny):
    rows = sweep(tiny, replace(SETTINGS, steps=1), [0.0, 1.0], seed=3)
    assert [(r["what"], r["replay"], r["ewc"]) for r in rows] == [
        ("untouched", False, 0.0), ("first", False, 0.0), ("second", False, 0.0), ("second", True, 0.0),
        ("second", False, 1.0), ("second", True, 1.0),
    ]  # fmt: skip
    assert all(np.isfinite([r["first"], r["second"], r["kl"]]).all() for r in rows)


def test_three_tastes_in_a_row_are_measured_after_each(tiny):
    """Each taste is learned in its turn, and replay of the earlier tastes changes what is learned."""
    questions = [q for q, _ in FOOD[:6]]
    tastes = [[(q, letters[i % 4]) for i, q in enumerate(questions)] for letters in ("ABCD", "1234", "wxyz")]
    rows = three_tastes.run(tiny, replace(SETTINGS, steps=4), [0.0], 3, tastes=tastes)
    stages = [(r["after"], r["replay"]) for r in rows]
    assert stages == [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]
    nll = [r["nll"] for r in rows]
    for taste in range(3):
        assert nll[taste + 1][taste] < nll[taste][taste], (taste, nll)
    assert nll[5][0] < nll[3][0], "replay keeps more of the first taste"
    assert three_tastes.table(rows).count("\n") == 7
