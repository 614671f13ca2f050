"""A base LoRA against the frozen model at every token of the reference text: slow twins, what is stored."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.sampling import log_softmax
from ruvmlx.sona import whole_text
from ruvmlx.sona.reference_text import read
from ruvmlx.sona.whole_text import WholeText, WholeTextReader
from tests.backends.test_lora import random_base

from .feedback import reply


@pytest.fixture(scope="session")
def tiny_backend(tiny):
    """A model small enough to read the reference text often."""
    return NativeBackend(tiny, threads=1)


@pytest.fixture
def learner(open_tiny):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        yield runtime.learner
        runtime.learner.active.install()


def slow_losses(active) -> np.ndarray:
    """The negative log-likelihood of each token of prose, with the backend's LoRA, float64."""
    backend, model = active.backend, active._model
    text = read(backend, model.tokenizer, model.shape.max_context)
    logits = backend.head(np.ascontiguousarray(text.states[text.answers :]))
    pairs = zip(logits, text.following[text.answers :], strict=True)
    said = [log_softmax(row.astype(np.float64))[y] for row, y in pairs]
    return -np.array(said)


def test_the_rise_of_prose_is_the_mean_over_all_its_tokens(learner):
    active = learner.active
    active.backend.set_lora(None)
    before = slow_losses(active)
    probe = active.probe_base(random_base(active._model.config, size=0.1)).probe
    after = slow_losses(active)
    assert probe.rise == pytest.approx((after - before).mean(), rel=1e-3)
    assert active._whole.read(active.frozen_probe).losses == pytest.approx(before, abs=1e-4) and len(
        before
    ) > len(probe.contexts)


def test_the_frozen_model_reads_the_texts_once(learner, monkeypatch):
    """A process that begins later finds its predictions in the store. Damaged data or data of other texts
    count as none."""
    active, reads = learner.active, []
    plain = whole_text.reference_text.read

    def read_and_count(*arguments):
        reads.append(1)
        return plain(*arguments)

    monkeypatch.setattr(whole_text.reference_text, "read", read_and_count)
    store, model, backend = active._store, active._model, active.backend
    whole = active._whole.read(active.frozen_probe)
    assert whole.states.base is None  # a view would keep the states of prose in memory
    backend.set_lora(random_base(model.config))
    base = backend.lora

    def again(texts=None):
        reads.clear()
        found = WholeTextReader(store, model, backend).read(replace(active.frozen_probe, read_texts=texts))
        assert backend.lora is base
        return found, len(reads)

    assert again()[0].states == pytest.approx(whole.states, abs=1e-2) and again()[1] == 0
    assert active._whole.read(active.frozen_probe) is whole and not reads
    few, count = again(whole.texts[[0, -1]])
    assert count == 1 and len(few.states) < len(whole.states) and few.answers.tolist() == [0]
    damaged = WholeText(whole.texts, whole.states, np.full_like(whole.losses, np.nan)).to_bytes()
    for data in (b"", b"no archive", whole.to_bytes()[:-40], damaged):
        store.checkpoints.put_measurement(model.fingerprint, "reference/whole", data)
        assert again()[1] == 1
    assert again()[1] == 0


def test_a_token_without_probability_has_a_finite_loss():
    from ruvmlx.sona.prose_drift import losses

    found = losses(np.array([[0.0, 1.0], [0.25, 0.75]], np.float32), np.array([0, 0]))
    assert np.isfinite(found).all() and found[0] > 80 and found[1] == pytest.approx(np.log(4))
