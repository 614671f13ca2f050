"""Dropout in the background loop: what is left out, its gradient, and runs that are stopped."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.sona import background, promotion
from ruvmlx.training.accumulator import GradientAccumulator
from ruvmlx.training.dropout import draw_masks, leave_out
from ruvmlx.training.slices import TrainingText
from ruvmlx.training.trainer import Trainer

from ..backends.test_lora import random_base
from .training_runs import QUICK, consolidate, rated_runtime, steady, tiny_backend  # noqa: F401 - fixtures

DROPPED = replace(QUICK, dropout=0.3)


def test_the_share_and_the_mean_of_what_is_kept(tiny):
    """Over many masks, the change is that without dropout; each mask is 0 or 1 / (1 - rate)."""
    base, rate = random_base(tiny.config), 0.25
    total = {p: np.zeros_like(a) for p, (a, _) in base.pairs.items()}
    for i in range(400):
        masks = draw_masks(base, rate, (3, 1, i))
        assert set(masks) == set(base.pairs)
        for p, (a, b) in leave_out(base.pairs, masks).items():
            assert set(np.unique(masks[p])) <= {np.float32(0), np.float32(1 / (1 - rate))}
            assert b is base.pairs[p][1]
            total[p] += a / 400
    for p, (a, _) in base.pairs.items():
        assert np.linalg.norm(total[p] - a) < 0.1 * np.linalg.norm(a)
    kept = np.concatenate([m[:, 0] > 0 for m in masks.values()])
    assert abs(kept.mean() - (1 - rate)) < 0.1
    again = draw_masks(base, rate, (3, 1, 399))
    assert all(np.array_equal(masks[p], again[p]) for p in masks)
    assert draw_masks(base, 0.0, (1,)) == {} and leave_out(base.pairs, {}) == dict(base.pairs)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_wrong_rate_is_refused(tiny, rate):
    with pytest.raises(ValueError, match="rate"):
        draw_masks(random_base(tiny.config), rate, (1,))


def test_the_gradient_is_that_of_finite_differences(tiny):
    """By kept and by left-out inputs of lora_a, and by lora_b, of the loss with these masks."""
    trainer, place = Trainer(tiny, "cpu"), ("v_proj", 0)
    base, text = random_base(tiny.config, size=0.1), TrainingText(tuple(range(3, 20)), 5)
    masks = draw_masks(base, 0.4, (7,))

    def loss(pairs) -> float:
        return trainer.reply(BaseLoRA(leave_out(pairs, masks), base.scale), text)[0]

    grads = leave_out(trainer.reply(BaseLoRA(leave_out(base.pairs, masks), base.scale), text)[1], masks)
    left, kept = (int(np.flatnonzero((masks[place][:, 0] > 0) == which)[0]) for which in (False, True))
    step = np.float32(3e-2)
    for factor, at in ((0, (left, 0)), (0, (kept, 0)), (1, (0, 2))):
        values = []
        for way in (1, -1):
            pair = [w.copy() for w in base.pairs[place]]
            pair[factor][at] += way * step
            values.append(loss({**base.pairs, place: tuple(pair)}))
        slope = (values[0] - values[1]) / (2 * step)
        assert grads[place][factor][at] == pytest.approx(slope, rel=0.05, abs=2e-5)
    assert grads[place][0][left].tolist() == [0.0] * grads[place][0].shape[1]
    assert np.abs(grads[place][0][kept]).max() > 0
    trainer.close()


def trained_bytes(runtime, settings) -> bytes:
    report, _ = consolidate(runtime, settings)
    assert report["promoted"], report["reason"]
    found = runtime.learner.base.to_bytes()
    runtime.rollback(14)
    runtime.learner.sync()
    return found


def test_a_run_with_dropout_is_another_and_the_same_again(rated_runtime, monkeypatch):  # noqa: F811
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    plain, one, other = (trained_bytes(rated_runtime, s) for s in (QUICK, DROPPED, DROPPED))
    assert one == other != plain


def test_the_loop_takes_its_gradients_with_the_masks(rated_runtime, monkeypatch):  # noqa: F811
    """Where all masks leave the first input out, no gradient of lora_a reaches it; the rest have some."""
    seen, real = [], GradientAccumulator.apply

    def leave_the_first_out(base, rate, seed):
        assert rate == DROPPED.dropout
        masks = {p: np.ones((a.shape[0], 1), np.float32) for p, (a, _) in base.pairs.items()}
        for mask in masks.values():
            mask[0] = 0
        return masks

    def note_and_apply(self, *given):
        seen.append({p: (a.copy(), b.copy()) for p, (a, b) in self.pairs.items()})
        return real(self, *given)

    monkeypatch.setattr(background, "draw_masks", leave_the_first_out)
    monkeypatch.setattr(GradientAccumulator, "apply", note_and_apply)
    consolidate(rated_runtime, DROPPED)
    assert len(seen) == DROPPED.steps
    for pairs in seen[1:]:  # lora_b is zero before the first step
        for a, b in pairs.values():
            assert not a[0].any() and a[1:].any() and b.any()


@pytest.mark.parametrize("at", [120, 181])
def test_a_stopped_run_continues_with_the_same_masks(rated_runtime, monkeypatch, at):  # noqa: F811
    """From memory and from the store: the same factors, bit for bit."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    wanted, counts = trained_bytes(rated_runtime, DROPPED), [0]

    class Counting(threading.Event):
        def is_set(self):
            counts[0] += 1
            return counts[0] >= at

    report, _ = consolidate(rated_runtime, DROPPED, Counting())
    assert not report["promoted"] and "after" in report["reason"]
    if at % 2:
        rated_runtime.learning.loops.background().close()
    assert trained_bytes(rated_runtime, DROPPED) == wanted
