"""The background loop is stopped, killed and resumed: nothing is lost, and nothing is half written."""

# ruff: noqa: F811 - the fixtures of training_runs.py are parameters here

import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.sona import background, promotion, replay
from ruvmlx.sona.adapter_history import ATTEMPTS, DUE, AdapterHistory
from ruvmlx.sona.background import Background
from ruvmlx.store import HeadMoved, Store, checkpoints
from ruvmlx.training import trainer

from .pauses import Watch
from .training_runs import (  # noqa: F401 - fixtures
    QUICK,
    answer,
    buffer_of,
    consolidate,
    rated_runtime,
    steady,
    tiny_backend,
)


@pytest.mark.parametrize("at", [1, 30, 75, 141, 300, 451])
def test_stopped_and_resumed_equals_uninterrupted(rated_runtime, monkeypatch, at):
    """Stopped at any slice, resumed from memory or from the store: the same factors, bit for bit."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    want, _ = consolidate(rated_runtime)
    assert want["promoted"], want["reason"]
    base = rated_runtime.learner.base.to_bytes()
    rated_runtime.rollback(14)
    rated_runtime.learner.sync()
    cancel, counts = threading.Event(), [0]

    class Counting(threading.Event):
        def is_set(self):
            counts[0] += 1
            return counts[0] >= at

    report, _ = consolidate(rated_runtime, cancel=Counting())
    assert not report["promoted"] and "stopped" in report["reason"]
    assert rated_runtime.backend.lora is None and rated_runtime.learning.is_due() == (
        "after" in report["reason"]
    )
    assert rated_runtime.status().adapter_version == 14
    if at % 2:  # as at the end of the program
        began = rated_runtime.learning.loops.background().is_paused
        rated_runtime.learning.loops.background().close()
        assert (rated_runtime.learner.history.training() is not None) == began
        assert not rated_runtime.learning.loops.background().is_paused
    again, _ = consolidate(rated_runtime, cancel=cancel)
    assert again["promoted"] == want["promoted"] and again["loss_after"] == want["loss_after"]
    assert rated_runtime.learner.base.to_bytes() == base
    assert rated_runtime.learner.history.training() is None


def test_it_ends_while_ratings_keep_coming(rated_runtime, monkeypatch):
    """The next run trains no more: it goes on with the test."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    history, attempts = type(rated_runtime.learner.history), []

    def head_moved(*args):
        attempts.append(1)
        raise HeadMoved

    with monkeypatch.context() as moving:
        moving.setattr(history, "promote", head_moved)
        moving.setattr(history, "refuse", head_moved)
        report, losses = consolidate(rated_runtime)
    assert not report["promoted"] and "stopped after 4 of 4" in report["reason"] and len(losses) == 4
    assert len(attempts) == ATTEMPTS and rated_runtime.backend.lora is None
    again, losses = consolidate(rated_runtime)
    assert again["promoted"] and losses == []


@pytest.mark.parametrize("restart", [False, True])
def test_stopped_at_every_kind_of_pause(rated_runtime, monkeypatch, restart):
    """Each place in the code that pauses ends the run once, and it goes on: the same base, bit for bit."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    monkeypatch.setattr(background, "SAVE_EVERY", 1)
    want, losses = consolidate(rated_runtime)
    assert want["promoted"], want["reason"]
    base, probe = rated_runtime.learner.base.to_bytes(), rated_runtime.learner.probe.packed_probs
    rated_runtime.rollback(14)
    rated_runtime.learning.loops.close()
    rated_runtime.learner.sync()
    known, seen = set(), []
    for _ in range(200):
        cancel = Watch(known)
        report, some = consolidate(rated_runtime, cancel=cancel)
        seen += some
        if not cancel.is_set():
            break
        assert not report["promoted"] and rated_runtime.backend.lora is None
        assert rated_runtime.learning.is_due() or "before it began" in report["reason"]
        if restart:
            rated_runtime.learning.loops.close()
    assert report["promoted"] and report["loss_after"] == want["loss_after"]
    assert rated_runtime.learner.base.to_bytes() == base and seen[-1] == losses[-1]
    np.testing.assert_array_equal(rated_runtime.learner.probe.packed_probs, probe)
    for part in PARTS:
        assert any(part in place for place in known), part


PARTS = (
    "replay._examples", "replay._texts", "background._start", "graph._by_blocks", "trainer._layer_input",
    "trainer._run", "trainer.states", "adamw.update", "checkpoints.put_training", "background._accumulate",
    "accumulator.apply_with_ewc", "promotion.frozen_logprobs", "promotion._nll", "promotion._loss",
    "reference_text.read", "prose_drift.run", "whole_text.kl", "base_probe._compare",
    "promotion._probed_base", "adapter_history.promote",
)  # fmt: skip


def test_a_stop_costs_one_text_at_most(rated_runtime, monkeypatch):
    """What the gate and the texts of a step have found is known when the run goes on."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    counts = {"texts": 0, "logprobs": 0, "trainers": 0}

    def counting(owner, name, what):
        plain = getattr(owner, name)

        def call_and_count(*args, **kwargs):
            found = plain(*args, **kwargs)
            counts[what] += 1  # only what came to an end
            return found

        monkeypatch.setattr(owner, name, call_and_count)

    counting(trainer.Trainer, "_run", "texts")
    counting(promotion.PromotionTest, "_logprob", "logprobs")
    counting(trainer.Trainer, "__init__", "trainers")
    consolidate(rated_runtime)
    want = dict(counts)
    rated_runtime.rollback(14)
    rated_runtime.learning.loops.close()
    counts.update(texts=0, logprobs=0, trainers=0)
    known: set[str] = set()
    while True:
        consolidate(rated_runtime, cancel=(cancel := Watch(known)))
        if not cancel.is_set():
            break
    assert len(known) > 30 and counts == want


def test_a_training_is_written_whole_or_not_at_all(rated_runtime, monkeypatch):
    """Left in the middle of it, what was kept before still is."""
    monkeypatch.setattr(checkpoints, "WRITTEN", 3)
    history, calls = rated_runtime.learner.history, []
    for state in (b"0123456789", b"another one"):
        history.put_training(state, lambda: calls.append(1))
        assert history.training() == state
    assert len(calls) == 2 * (2 + 4)

    def stop():
        calls.pop()
        if len(calls) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        history.put_training(b"a third that is not written", stop)
    assert history.training() == b"another one"
    history.put_training(None)
    assert history.training() is None


class Later(threading.Event):
    """It is set after 250 looks: after some steps of the training."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def is_set(self):
        self.count += 1
        return self.count > 250


def test_a_stopped_run_whose_ratings_were_undone_starts_afresh(rated_runtime):
    consolidate(rated_runtime, cancel=Later())
    rated_runtime.learning.loops.background().close()
    loop = Background(rated_runtime.learner, rated_runtime.model, QUICK)
    assert loop._resumable_run() is not None
    assert (
        Background(rated_runtime.learner, rated_runtime.model, replace(QUICK, rank=5))._resumable_run()
        is None
    )
    rated_runtime.undo()
    rated_runtime.learner.sync()
    assert loop._resumable_run() is None


def test_a_stopped_step_begins_again_without_a_reply_that_was_deleted(rated_runtime, monkeypatch):
    """A deletion makes no adapter version. The run goes on in memory as after a restart, where only whole
    steps are known."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    monkeypatch.setattr(background, "SAVE_EVERY", 1)
    loops, bases, real, deleted = rated_runtime.learning.loops, [], replay.load, set[str]()

    def load(*args):
        buffer = real(*args)
        return replace(buffer, train=[one for one in buffer.train if one.reply_id not in deleted])

    monkeypatch.setattr(replay, "load", load)
    for restart in (False, True):
        deleted.clear()
        consolidate(rated_runtime, cancel=Later())
        loop = loops.background()
        assert loop._paused.step and loop._gradients.pending
        seed = loop._paused.facts["version"], loop._paused.step
        deleted.add(buffer_of(rated_runtime).batch(*seed)[0][0].reply_id)
        if restart:
            loop.close()
        report, _ = consolidate(rated_runtime)
        assert report["promoted"]
        bases.append(rated_runtime.learner.base.to_bytes())
        rated_runtime.rollback(14)
    assert bases[0] == bases[1]


@pytest.mark.parametrize("restart", [False, True])
def test_a_rating_that_came_while_a_run_was_stopped_can_be_undone(rated_runtime, monkeypatch, restart):
    """The stopped run goes on with the new rating. If the user takes the rating back, a new run begins. Its
    result is the same as without the rating."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    monkeypatch.setattr(background, "SAVE_EVERY", 1)
    loops, steps = rated_runtime.learning.loops, []
    consolidate(rated_runtime)
    wanted = rated_runtime.learner.base.to_bytes()
    rated_runtime.rollback(14)
    for last in (False, True):
        consolidate(rated_runtime, cancel=Later())
        steps.append(loops.background()._paused.step)
        if not last:
            rated_runtime.rate(answer(rated_runtime, 20), "down")
    assert 0 < steps[0] < steps[1]
    if restart:
        loops.background().close()
    rated_runtime.undo()
    report, losses = consolidate(rated_runtime)
    assert report["promoted"] and len(losses) == QUICK.steps
    assert rated_runtime.learner.base.to_bytes() == wanted


def test_a_rating_that_another_process_undoes_meanwhile_teaches_nothing(rated_runtime, monkeypatch, home):
    """The result of a training that read it is not used."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    history = rated_runtime.learner.history

    class Undoing(threading.Event):
        count = 0

        def is_set(self):
            Undoing.count += 1
            if Undoing.count == 250:
                AdapterHistory(Store(home / "ruvmlx.db"), history.fingerprint, history.name).undo()
            return False

    report, losses = consolidate(rated_runtime, cancel=Undoing())
    assert losses and not report["promoted"] and "changed meanwhile" in report["reason"]
    assert rated_runtime.status().ratings == 13 and rated_runtime.status().consolidations == 0


@pytest.mark.parametrize("result", ["promote", "refuse"])
def test_a_result_and_the_end_of_its_saved_run_are_one_commit(rated_runtime, monkeypatch, result):
    """The process ends just after the commit of the result. Before, the saved run stayed, and the next run
    then began after one rating in place of `DUE`."""
    monkeypatch.setattr(background, "SAVE_EVERY", 1)
    monkeypatch.setattr(promotion, "objection", lambda *a: "" if result == "promote" else "a test")
    commit = getattr(AdapterHistory, result)

    def commit_and_end(history, *facts):
        assert history.training() is not None
        commit(history, *facts)
        raise KeyboardInterrupt

    monkeypatch.setattr(AdapterHistory, result, commit_and_end)
    with pytest.raises(KeyboardInterrupt):
        consolidate(rated_runtime)
    history = rated_runtime.learner.history
    assert history.training() is None and history.new_and_missing()[1] == DUE
