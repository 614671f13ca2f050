"""Questions as vectors: similar questions are near, whatever the chat."""

import numpy as np
import pytest

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import RuvmlxError
from ruvmlx.models.config.model import Message
from ruvmlx.sona import embedding

from ..backends.test_lora import random_base


def pooled_ref(hidden) -> np.ndarray:
    total, weights = np.zeros(hidden.shape[1]), 0
    for t, h in enumerate(hidden, start=1):
        total += t * h.astype(np.float64)
        weights += t
    return total / weights


def whitened_ref(states, x, k) -> np.ndarray:
    """Whitening by the eigenvectors of the whole covariance matrix."""
    states = states.astype(np.float64)
    centred = states - states.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    values, vectors = values[::-1], vectors[:, ::-1]
    coordinates = (x - states.mean(axis=0)) @ vectors
    coordinates[:k] *= np.sqrt(values[k] / values[:k])
    y = vectors @ coordinates
    return y / np.linalg.norm(y)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_pooling_weighs_later_tokens_more(tokens):
    hidden = np.random.default_rng(tokens).normal(size=(tokens, 5)).astype(np.float32)
    np.testing.assert_allclose(embedding.mean_pool(hidden), pooled_ref(hidden), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count,width", [(41, 37), (99, 50), (20, 61)])
def test_whitening_matches_the_covariance_matrix(count, width):
    rng = np.random.default_rng(count)
    states = (rng.normal(size=(count, width)) * np.geomspace(9, 0.1, width) + 3).astype(np.float32)
    x = states.mean(axis=0) + rng.normal(size=width)
    k = min(embedding.WHITENED, min(count, width) - 1)
    got = embedding.whitening(states)(x)
    np.testing.assert_allclose(got, whitened_ref(states, x, k), atol=1e-4)


def test_vectors_of_wide_models_are_projected_and_their_products_survive():
    rng = np.random.default_rng(3)
    whiten = embedding.whitening(rng.normal(size=(50, 2000)).astype(np.float32))
    a, noise = rng.normal(size=(2, 40, 2000)).astype(np.float32)
    b = a + noise
    whiten = embedding.Whitening(0 * whiten.mean, whiten.basis, whiten.gain**0)  # the projection alone
    x, y = whiten(a), whiten(b)
    assert x.shape == (40, embedding.DIMENSIONS) and np.allclose(np.linalg.norm(x, axis=1), 1, atol=1e-5)
    true = np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert np.abs(np.sum(x * y, axis=1) - true).max() < 0.15


def test_statistics_that_are_damaged_are_measured_again(tiny_whitening, tiny):
    width = tiny.config.hidden_size
    good = embedding.Whitening.from_bytes(tiny_whitening, width)
    assert good is not None and good.basis.shape == (width, len(good.gain))
    assert embedding.Whitening.from_bytes(tiny_whitening[:-40], width) is None
    assert embedding.Whitening.from_bytes(b"", width) is None
    assert embedding.Whitening.from_bytes(tiny_whitening, width + 1) is None
    bad = embedding.Whitening(good.mean * np.nan, good.basis, good.gain)
    assert embedding.Whitening.from_bytes(bad.to_bytes(), width) is None


def test_a_model_that_computes_nan_is_refused():
    with pytest.raises(RuvmlxError, match="damaged"):
        embedding.whitening(np.full((9, 4), np.nan, np.float32))


def test_a_long_message_is_read_by_its_beginning_and_end(tiny, tiny_backend, monkeypatch):
    read = []
    original = tiny_backend.hidden_states
    monkeypatch.setattr(tiny_backend, "hidden_states", lambda ids: read.append(len(ids)) or original(ids))
    text = "what is the end of " + "a very long message " * 5000 + "?"
    changed = embedding.read_question(tiny_backend, tiny.tokenizer, text[:-1] + "!")
    assert not np.array_equal(embedding.read_question(tiny_backend, tiny.tokenizer, text), changed)
    assert max(read) <= embedding.MAX_TOKENS + 1
    assert embedding.read_question(tiny_backend, tiny.tokenizer, "") is None


def test_the_same_question_is_the_same_vector_in_every_chat(open_tiny):
    with open_tiny() as runtime:
        ids = []
        for before in ([], [Message("user", "hello"), Message("assistant", "good day")]):
            request = GenerationRequest(
                messages=[*before, Message("user", "why?")], max_new_tokens=3, sampling=Sampling(seed=1)
            )
            list(runtime.writer.generate(request))
            assert (
                runtime.store.replies.query(request.request_id) is None or before
            )  # reading costs the reply nothing
            runtime.learning.settle()
            ids.append(request.request_id)
        first, second = (runtime.store.replies.query(i) for i in ids)
    assert first is not None
    np.testing.assert_array_equal(first, second)


def test_questions_are_read_without_the_base_in_use(open_tiny, tiny):
    with open_tiny() as runtime:
        memory, backend = runtime.learner.rating_index, runtime.backend
        plain = memory.state_of("why?")
        base = random_base(tiny.config)
        backend.set_lora(base)
        memory._questions.clear()
        np.testing.assert_array_equal(memory.state_of("why?"), plain)
        assert backend.lora is base
        assert not np.array_equal(embedding.read_question(backend, tiny.tokenizer, "why?"), plain)
        backend.set_lora(None)


PAIRS = [
    ("How long should I boil an egg?", "What is the right time for hard boiled eggs?"),
    ("Why is my SQL query slow?", "How can I speed up a database select?"),
    ("What should I see in Rome in two days?", "Plan a weekend in Rome for me."),
    ("What helps against a sore throat?", "My throat hurts, any home remedies?"),
    ("Why do ships float?", "How can a heavy steel boat stay on the water?"),
    ("How often should I water a cactus?", "How much water does my cactus need?"),
    ("Who was Cleopatra?", "Tell me about the queen Cleopatra."),
]


def test_a_paraphrase_is_nearer_than_any_other_question(starter):
    """On the starter model: real words, real weights."""
    backend = open_backend("auto", starter)
    whiten = embedding.measure(backend, starter.tokenizer)
    one, other = (
        whiten(np.stack([embedding.read_question(backend, starter.tokenizer, p[i]) for p in PAIRS]))
        for i in (0, 1)
    )
    alike = one @ other.T
    assert (alike.argmax(axis=1) == np.arange(len(PAIRS))).all()
    assert np.diag(alike).min() > 0.3 > np.median(alike[~np.eye(len(PAIRS), dtype=bool)])
