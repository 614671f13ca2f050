"""base_targets: the background loop trains the chosen matrices; others of the base stay as they are."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx import settings
from ruvmlx.errors import UsageError
from ruvmlx.lora.base_lora import EMBEDDING, MODULES, BaseLoRA
from ruvmlx.lora.merge import HEAD
from ruvmlx.sona import background, base_targets, promotion
from ruvmlx.sona.background import Background
from ruvmlx.training.trainer import Trainer

from .training_runs import (  # noqa: F401 - fixtures
    QUICK,
    answer,
    buffer_of,
    consolidate,
    rated_runtime,
    steady,
    tiny_backend,
)

LAYERS = range(2)
ATTENTION = [(module, layer) for layer in LAYERS for module in MODULES[:4]]
FFN = [(module, layer) for layer in LAYERS for module in MODULES[4:7]]


@pytest.fixture
def promote_always(monkeypatch):
    """Every result is used."""
    monkeypatch.setattr(promotion, "objection", lambda *_: "")


def trained_places(runtime) -> set:
    """Places of the base in use whose matrices differ from the original model's."""
    return {place for place, (_, b) in runtime.learner.base.pairs.items() if b.any()}


@pytest.mark.parametrize(
    ("targets", "places"),
    [
        ("attention", ATTENTION),
        ("ffn", FFN),
        ("all", ATTENTION + FFN),
        ("q_proj:1,v_proj:0-1", [("q_proj", 1), ("v_proj", 0), ("v_proj", 1)]),
        ("embedding,k_proj:1", [EMBEDDING, ("k_proj", 1)]),
    ],
)
def test_the_chosen_matrices_are_trained(rated_runtime, promote_always, targets, places):  # noqa: F811
    """And the output head takes over what ratings changed in it, as always."""
    report, losses = consolidate(rated_runtime, replace(QUICK, targets=targets))
    assert report["promoted"] and report["matrices"] == len(places) and len(losses) == 4
    assert trained_places(rated_runtime) == {*places, HEAD} and rated_runtime.learner.micro.norm < 1e-6


def test_the_embedding_changes_at_the_tokens_of_the_texts_alone(rated_runtime, promote_always):  # noqa: F811
    """A token that was in no text of the training keeps its row, to the bit; the store has no row for it. A
    stopped run goes on with the same numbers."""
    runtime, seen, real = rated_runtime, set(), Trainer._run

    def train_and_note(self, base, text, *rest):
        seen.update(text.tokens[:-1])
        return real(self, base, text, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "_run", train_and_note)
        report, _ = consolidate(runtime, replace(QUICK, targets="embedding"))
    assert report["promoted"] and report["matrices"] == 1
    base, height = runtime.learner.base, runtime.model.config.vocab_size
    a, b = base.pairs[EMBEDDING]
    changed = set(np.flatnonzero((a @ b).any(axis=1)).tolist())
    assert changed == seen and len(seen) < height
    assert len(BaseLoRA({EMBEDDING: (a, b)}).to_bytes()) < 4 * a.size + 4 * b.size
    again = BaseLoRA.from_bytes(base.to_bytes())
    np.testing.assert_array_equal(again.pairs[EMBEDDING][0], a)


def test_the_default_is_what_was_trained_before_there_was_a_choice():
    assert settings.Settings().base_targets == background.TrainingSettings().targets == "attention,ffn"
    assert background.TrainingSettings().depth == 1


def test_the_head_alone_is_merged_and_nothing_is_trained(rated_runtime):  # noqa: F811
    """The replies stay as likely as they were, so ratings need not prefer the result."""
    text = buffer_of(rated_runtime).held_out[0].text
    hidden = rated_runtime.backend.hidden_states(text.tokens)

    def logits():
        found = rated_runtime.backend.head(hidden)
        rated_runtime.learner.micro.add_to_logits(found, hidden)
        return found

    before = logits()
    report, losses = consolidate(rated_runtime, replace(QUICK, targets="head"))
    assert report["promoted"], report["reason"]
    assert (report["steps"], report["matrices"], losses) == (0, 0, [])
    assert report["loss_after"] == pytest.approx(report["loss_before"], abs=promotion.ROUNDED)
    assert set(rated_runtime.learner.base.pairs) == {HEAD} and rated_runtime.learner.micro.norm < 1e-6
    assert np.allclose(logits(), before, atol=2e-3)


def test_top_takes_the_matrices_with_the_largest_gradients(rated_runtime, promote_always):  # noqa: F811
    """Of those that are named; compared with the gradients by hand."""
    learner, buffer = rated_runtime.learner, buffer_of(rated_runtime)
    examples = buffer.batch(learner.version, 0)[0]
    trainer = Trainer(rated_runtime.model, backend=rated_runtime.backend)
    trainer.set_head(None, learner.micro)
    here = base_targets.probe_base(rated_runtime.model.config, None, ATTENTION)
    sizes = dict.fromkeys(ATTENTION, 0.0)
    for example in examples:
        for place, (_, columns) in trainer.squares(here, example.text).items():
            sizes[place] += float(columns.sum())
    wanted = sorted(ATTENTION, key=lambda place: -sizes[place])[:3]
    report, _ = consolidate(rated_runtime, replace(QUICK, targets="attention,top:3"))
    assert report["matrices"] == 3 and trained_places(rated_runtime) == {*wanted, HEAD}
    assert len(set(sizes.values())) == len(sizes)


def test_what_is_not_trained_stays_as_it_is_and_stays_active(rated_runtime, promote_always):  # noqa: F811
    """A base of other matrices is in force during the training, and part of the result."""
    consolidate(rated_runtime, replace(QUICK, targets="ffn"))
    first = rated_runtime.learner.base
    for i in range(14, 18):
        rated_runtime.rate(answer(rated_runtime, i), "up" if i % 2 else "down")
    loop = Background(rated_runtime.learner, rated_runtime.model, replace(QUICK, targets="q_proj"))
    seen, real = [], Trainer.reply

    def train_and_note(self, base, *rest):
        seen.append(set(base.pairs))
        return real(self, base, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "reply", train_and_note)
        report = loop.run()
    assert report["promoted"] and report["matrices"] == 2
    assert seen and all({*FFN, ("q_proj", 0)} <= places for places in seen)
    now = rated_runtime.learner.base
    assert trained_places(rated_runtime) == {*FFN, ("q_proj", 0), ("q_proj", 1), HEAD}
    for place in FFN:
        before, after = (base.pairs[place][0] @ base.pairs[place][1] * base.scale for base in (first, now))
        assert np.allclose(after, before, atol=1e-6)


def test_a_stopped_choice_goes_on_with_the_next_reply(rated_runtime, promote_always, monkeypatch):  # noqa: F811
    """No reply is measured twice, though each run is stopped after one of them."""
    measured, real = [], Trainer.squares
    loop = Background(rated_runtime.learner, rated_runtime.model, replace(QUICK, targets="all,top:2"))
    cancel = threading.Event()

    def stopping(self, base, text, pause):
        found = real(self, base, text, pause)
        measured.append(text)
        cancel.set()
        return found

    monkeypatch.setattr(Trainer, "squares", stopping)
    examples = {e.reply_id for e in buffer_of(rated_runtime).batch(rated_runtime.learner.version, 0)[0]}
    for _ in range(20):
        cancel.clear()
        report = loop.run(cancel=cancel)
        if report["promoted"]:
            break
    monkeypatch.setattr(Trainer, "squares", real)
    assert len(measured) == len(examples)
    while not report["promoted"]:
        report = loop.run()
    assert report["matrices"] == 2


def test_the_setting_reaches_the_loop_and_is_checked_when_a_model_opens(open_tiny, tiny_backend):  # noqa: F811
    with open_tiny(base_targets="v_proj:1,q_proj") as runtime:
        assert runtime.learning.loops.background().settings.targets == "v_proj:1,q_proj"
    with pytest.raises(UsageError, match=r"base_targets: 'q_proj:2' is not among the model's layers, 0 to 1"):
        open_tiny(base_targets="q_proj:2")
    with pytest.raises(UsageError, match="base_targets"):
        settings.parse("base_targets", "top", "a test")
    tiny_backend.set_lora(None)
