"""The directions in lora_b that raise the measures of replies, from replies that nobody rated."""

import threading
from contextlib import closing, suppress

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.config.model import Message
from ruvmlx.models.text import thinking
from ruvmlx.pausing import Stopped
from ruvmlx.sampling import LogitChanges, token_weights
from ruvmlx.sona import calibration, measure_directions, taste_push
from ruvmlx.sona.measure_directions import (
    _UNFINISHED,
    FINISHED,
    DirectionBank,
    MeasureDirections,
    StoredDirections,
    regress,
)
from ruvmlx.sona.sampled_replies import BegunReply, sampled_replies, sampling_of
from ruvmlx.sona.shipped import shipped_bytes
from ruvmlx.sona.taste_measures import MEASURES, measure_text
from ruvmlx.store import Store

from .training_runs import answer


@pytest.fixture
def backend(tiny):
    return NativeBackend(tiny, threads=1)


@pytest.fixture
def probe(tiny, backend):
    return calibration.measure(backend, tiny.tokenizer, 2, 2048)


@pytest.fixture
def store(home):
    with closing(Store(home / "ruvmlx.db")) as store:
        yield store


def by_one(model, backend, question, lora_a, tokens, seed):
    """The slow twin: gradients by reading each finished reply again."""
    prompt, rng = model.tokenizer.encode_chat([Message("user", question)]), np.random.default_rng([41, seed])
    longest, found = measure_directions.MAX_REPLY_TOKENS, []
    for together in (2, 1):
        begun = [BegunReply.of(backend, prompt, lambda: None) for _ in range(together)]
        found += sampled_replies(
            backend, model.tokenizer, begun, [rng] * together, longest, sampling_of(model), lambda: None
        )
    gradients, measures = [], []
    for ids, ended in found:
        end = [] if len(ids) == longest else [max(model.tokenizer.eos_ids)]
        states = backend.hidden_states([*prompt, *ids, *end][:-1])[len(prompt) - 1 :]
        said = np.zeros((len(states), backend.head(states).shape[1]))
        said[np.arange(len(states)), [*ids, *end]] = 1
        rows = backend.head(states)
        rule = LogitChanges(sampling_of(model))
        drawn_from = np.zeros_like(said)
        for row, logits, token in zip(drawn_from, rows, [*ids, *end], strict=True):
            rule.restrict(logits)
            kept, weights = token_weights(logits, sampling_of(model))
            row[kept] = weights / weights.sum()
            rule.take(token)
        gradients.append((states @ lora_a) @ (said - drawn_from)[:, tokens])
        measures.append(measure_text(thinking.split(model.tokenizer.decode(ids)).answer, ended))
    return np.array(gradients), np.array(measures)


@pytest.mark.parametrize("own", [{}, {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}])
def test_the_gradients_are_those_of_the_finished_replies(tiny, backend, probe, monkeypatch, own):
    monkeypatch.setattr(measure_directions, "TOGETHER", 2)
    monkeypatch.setattr(tiny, "default_sampling", own)
    lora_a, bank = probe.directions[:, 0].copy(), DirectionBank(probe.tokens)
    bank.add(tiny, backend, "Name a river.", lora_a, 7, lambda: None)
    gradients, measures = by_one(tiny, backend, "Name a river.", lora_a, probe.tokens, 7)
    np.testing.assert_allclose(bank.gradients[0], gradients, atol=5e-3 * np.abs(gradients).max())
    np.testing.assert_array_equal(bank.measures[0], measures.astype(np.float32))


@pytest.mark.parametrize("replies, tokens", [(5, 3), (7, 31), (40, 13)])
def test_the_regression_is_ridge_regression(replies, tokens):
    rng = np.random.default_rng(replies)
    x, y = rng.normal(size=(replies, tokens)), rng.normal(size=(replies, 4))
    ridge = measure_directions.RIDGE * np.trace(x @ x.T) / replies
    slow = np.linalg.solve(x.T @ x + ridge * np.eye(tokens), x.T @ y).T
    np.testing.assert_allclose(regress(x, y), slow, rtol=1e-4, atol=1e-6)


def test_a_measure_that_tokens_decide_is_found():
    """Replies with more of token 5 have more of a measure. What replies to a question share counts not."""
    rng, bank = np.random.default_rng(3), DirectionBank(np.arange(10, 30))
    for _ in range(40):
        rows = rng.normal(size=(measure_directions.REPLIES, 20)) + 9 * rng.normal(size=20)
        values = np.zeros((len(rows), len(MEASURES)))
        values[:, 2] = rows[:, 5] + 30 * rng.normal()
        bank.gradients.append(rows)
        bank.measures.append(values)
    found = bank.directions()
    weights = np.zeros(len(MEASURES))
    weights[2] = -1.0
    logits = found.logits(weights, np.array([3, 15, 16, 29, 99]))
    assert logits[1] < -0.1 and np.abs(logits[[2, 3]]).max() < -0.3 * logits[1]
    assert logits[0] == logits[4] == 0  # these tokens have no direction
    assert np.abs(found.directions[3:]).max() == 0


def test_stored_and_loaded():
    rng = np.random.default_rng(5)
    rows = (rng.normal(size=(len(MEASURES), 17)) * rng.uniform(1e-6, 1e3, size=(len(MEASURES), 1))).astype(
        np.float32
    )
    found = MeasureDirections.from_bytes(MeasureDirections(np.arange(17), rows).to_bytes())
    np.testing.assert_allclose(found.directions, rows, rtol=2e-3, atol=1e-3 * np.abs(rows).max())
    assert MeasureDirections.from_bytes(MeasureDirections(np.arange(17), rows[1:]).to_bytes()) is None
    for damaged in (
        None,
        b"",
        b"PK\x03\x04 no archive",
        MeasureDirections(np.arange(17), rows).to_bytes()[:200],
    ):
        assert MeasureDirections.from_bytes(damaged) is None


def test_it_stops_and_goes_on(tiny, backend, probe, store, monkeypatch):
    """A stop loses at most one question; in the end only the directions are stored."""
    monkeypatch.setattr(measure_directions, "questions", lambda: [f"question {i}?" for i in range(11)])
    monkeypatch.setattr(measure_directions, "MIN_QUESTIONS", 4)
    whole = StoredDirections(store, "whole")
    whole.complete(tiny, backend, probe, lambda: None)
    calls, parts = iter(range(10**9)), StoredDirections(store, "parts")
    assert parts.of(probe.tokens) is None

    def pause():
        if next(calls) % 50 == 49:
            raise Stopped

    turns = 0
    while parts.of(probe.tokens) is None or store.checkpoints.measurement("parts", _UNFINISHED):
        turns += 1
        with suppress(Stopped):
            parts = StoredDirections(store, "parts")  # as another process
            parts.complete(tiny, backend, probe, pause)
    assert turns > 2
    np.testing.assert_array_equal(parts.of(probe.tokens).directions, whole.of(probe.tokens).directions)
    stored = store.checkpoints.measurement
    assert stored("parts", _UNFINISHED) is None and stored("parts", FINISHED)
    again = StoredDirections(store, "parts")
    again.complete(tiny, backend, probe, lambda: pytest.fail("nothing is missing"))
    np.testing.assert_allclose(
        again.of(probe.tokens).directions, whole.of(probe.tokens).directions, rtol=1e-2, atol=1e-2
    )


def test_a_bank_of_other_tokens_is_not_used(tiny, backend, probe):
    bank = DirectionBank(probe.tokens)
    bank.add(tiny, backend, "Why?", probe.directions[:, 0].copy(), 0, lambda: None)
    assert len(DirectionBank.from_bytes(bank.to_bytes(), probe.tokens).gradients) == 1
    assert DirectionBank.from_bytes(bank.to_bytes(), probe.tokens[1:]).gradients == []
    assert DirectionBank.from_bytes(bank.to_bytes()[:500], probe.tokens).gradients == []


def test_idle_time_finds_the_directions(open_tiny):
    with open_tiny() as runtime:
        learner = runtime.learner
        runtime.learning.settle(threading.Event())
        assert learner.directions.of(learner.probe.tokens) is None  # nobody has rated
        for i in range(2):
            runtime.rate(answer(runtime, i), "up")
        runtime.learning.settle(threading.Event())
        found = learner.directions.of(learner.probe.tokens)
        assert found.directions.any() and np.isfinite(found.directions).all()


def test_a_taste_pushes_along_the_directions(open_tiny, monkeypatch):
    monkeypatch.setattr(taste_push, "LOGIT", 0.0)
    monkeypatch.setattr(taste_push, "PUSH_KL", np.inf)
    with open_tiny() as runtime:
        learner, tokens = runtime.learner, runtime.learner.probe.tokens
        for i in range(10):
            runtime.rate(answer(runtime, i), "up" if i % 2 else "down")
        rows = np.random.default_rng(4).normal(size=(len(MEASURES), tokens.size))
        known = MeasureDirections(tokens, rows.astype(np.float32))
        now = learner.version, learner.micro, learner.probe
        learner.directions._found, before = known, learner.taste_push.of(*now)
        again = taste_push.TastePush(runtime.model.tokenizer, learner.taste, learner.directions)
        push = again.of(*now)
        weights = learner.taste.model.token_weights().mean[: len(MEASURES)]
        wanted = np.clip(taste_push.ALONG * weights @ rows, -6, 2) / learner.probe.reading
        others = np.delete(np.arange(tokens.size), learner.probe.coordinates.ends)
        assert not before[others].any() and push[others].any()
        np.testing.assert_allclose(push[others], wanted[others], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "measure, more, less",
    [
        ("lists", ("\n\n", "1", "*"), (" the", " because")),
        ("more 'you'", (" you", " your"), (" the",)),
        ("bold or italic text", (" **",), (" the", " a")),
        ("exclamation marks", ("!",), (".", " the")),
    ],
)
def test_the_directions_of_the_starter_are_shipped(starter, measure, more, less):
    found = MeasureDirections.from_bytes(shipped_bytes("directions", starter.fingerprint))
    weights = np.array([float(one.more == measure) for one in MEASURES])

    def logits(texts):
        tokens = [starter.tokenizer.encode(text, add_bos=False)[0] for text in texts]
        return found.logits(weights, np.array(tokens))

    assert logits(more).min() > 0.1 > logits(less).max()
