"""Gradients of several texts are one step of the optimiser."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.kernels.micro import NotFinite
from ruvmlx.training.accumulator import GradientAccumulator
from ruvmlx.training.adamw import Training

from .training_runs import QUICK, consolidate, rated_runtime, steady, tiny_backend  # noqa: F401 - fixtures

Q, V = ("q_proj", 0), ("v_proj", 1)
RATE, CLIP = 1e-2, 0.7


def some(seed: int, *places) -> dict:
    """Pairs for these places."""
    rng = np.random.default_rng(seed)
    sizes = {Q: (5, 3), V: (4, 6)}
    return {
        p: (
            rng.normal(size=(sizes[p][0], 2)).astype(np.float32),
            rng.normal(size=(2, sizes[p][1])).astype(np.float32),
        )
        for p in places
    }


def sum_of_pairs(*parts: dict) -> dict:
    """The sum of pairs, by hand."""
    places = {place: None for part in parts for place in part}
    return {p: tuple(sum(part[p][i] for part in parts if p in part) for i in (0, 1)) for p in places}


def training() -> Training:
    return Training(some(0, Q, V), 2.0)


def is_same(one: Training, other: Training) -> bool:
    return one.step == other.step and all(
        np.allclose(x, y, atol=1e-7)
        for name in ("pairs", "mean", "square")
        for place in one.pairs
        for x, y in zip(getattr(one, name)[place], getattr(other, name)[place], strict=True)
    )


def test_a_step_is_that_of_the_sum():
    """Texts may move different matrices; a text without a gradient counts, too. Then nothing is pending."""
    gradients, run, wanted = GradientAccumulator(), training(), training()
    parts = [some(1, Q, V), {}, some(2, V), some(3, Q)]
    wanted.update(sum_of_pairs(*parts), RATE, CLIP)
    for i, part in enumerate(parts):
        assert gradients.pending == i
        gradients.accumulate(0.5 * i, part)
    assert gradients.apply(run, RATE, CLIP) == gradients.loss + 3.0 == 3.0
    assert is_same(run, wanted) and not is_same(run, training())
    assert (gradients.pending, gradients.loss, gradients.pairs) == (0, 0.0, {})


def test_a_penalty_belongs_to_one_step():
    """Its gradient is added once, also where the step was stopped before; it is no text."""
    gradients, run, wanted = GradientAccumulator(), training(), training()
    text, slope = some(1, Q), some(2, Q, V)
    wanted.update(sum_of_pairs(text, slope), RATE, CLIP)
    gradients.accumulate(1.0, some(1, Q))

    def stop() -> None:
        raise InterruptedError

    for _ in range(3):
        with pytest.raises(InterruptedError):
            gradients.apply_with_ewc(run, RATE, CLIP, (0.25, slope), stop)
        assert gradients.pending == 1 and is_same(run, training())
    assert gradients.apply_with_ewc(run, RATE, CLIP, (0.25, slope)) == 1.25
    assert is_same(run, wanted) and gradients.pending == 0


def test_reset_forgets_what_is_pending():
    gradients, run, wanted = GradientAccumulator(), training(), training()
    gradients.accumulate(1.0, some(9, Q, V))
    gradients.reset()
    gradients.accumulate(1.0, some(1, Q))
    wanted.update(some(1, Q), RATE, CLIP)
    gradients.apply(run, RATE, CLIP)
    assert is_same(run, wanted)


@pytest.mark.parametrize("wrong", ["loss", "gradient", "penalty"])
def test_what_is_not_finite_changes_nothing(wrong):
    gradients, run = GradientAccumulator(), training()
    grads = some(1, Q)
    if wrong == "gradient":
        grads[Q][1][0, 0] = np.nan
    gradients.accumulate(np.inf if wrong == "loss" else 1.0, grads)
    slope = {Q: (np.full((5, 2), np.inf, np.float32), grads[Q][1])} if wrong == "penalty" else {}
    with pytest.raises(NotFinite):
        gradients.apply_with_ewc(run, RATE, CLIP, (0.0, slope))
    assert is_same(run, training()) and gradients.pending == 1


@pytest.mark.parametrize("ewc", [0.0, 3.0])
def test_the_background_loop_takes_its_steps_so(rated_runtime, monkeypatch, ewc):  # noqa: F811
    """As many texts as a batch has are pending before each step."""
    seen, name = [], "apply_with_ewc" if ewc else "apply"
    real = getattr(GradientAccumulator, name)

    def update_and_note(self, run, lr, clip, *rest):
        seen.append((self.pending, run.step, lr, clip))
        return real(self, run, lr, clip, *rest)

    monkeypatch.setattr(GradientAccumulator, name, update_and_note)
    settings = replace(QUICK, ewc=ewc)
    report, losses = consolidate(rated_runtime, settings)
    assert len(losses) >= 4 and report["steps"] == 4
    assert [step for _, step, *_ in seen] == [0, 1, 2, 3]
    assert len({pending for pending, *_ in seen}) == 1 and seen[0][0] > 4
    assert [lr for *_, lr, _ in seen] == [settings.rate(step) for step in range(4)]
