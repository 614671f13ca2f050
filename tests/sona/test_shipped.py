"""What the package has about a model, so that a user of that model need not wait for a measurement."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.lora import MicroLoRA
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import calibration, embedding
from ruvmlx.sona.calibration import Survey
from ruvmlx.sona.kl_probe import KLProbe, softmax_rows
from ruvmlx.sona.shipped import shipped_bytes, shipped_path
from ruvmlx.store import Store

from .test_first_reply import reply


def adapter_of_size(probe, size):
    """An adapter that moves the movable tokens by `size`, the same numbers for every probe."""
    adapter = MicroLoRA.fresh(probe.directions, probe.vocab_size)
    numbers = np.random.default_rng(5).normal(size=(adapter.lora_b.shape[0], probe.tokens.size)) * size
    lora_b = adapter.lora_b.copy()
    lora_b[:, probe.tokens] = numbers
    return replace(adapter, lora_b=lora_b)


@pytest.fixture
def backend(starter):
    return NativeBackend(starter, threads=2)


@pytest.fixture
def shipped_probe(starter, backend, whole_text):
    eos = np.array(sorted(starter.tokenizer.eos_ids))
    probe = KLProbe.from_bytes(shipped_bytes("probes", starter.fingerprint), backend.head, eos)
    assert probe is not None, "the reference text is another one: run `python -m tests.research.write_probe`"
    return probe


def test_the_starters_first_rating_measures_nothing(starter, backend, home, whole_text, monkeypatch):
    def refuse(*_):
        raise AssertionError("the model was measured")

    monkeypatch.setattr(calibration.Measurement, "run", refuse)
    monkeypatch.setattr(embedding.ReadQuestions, "read", refuse)
    with Runtime(Store(home / "ruvmlx.db"), starter, backend, Settings(kv_disk=None)) as runtime:
        assert runtime.learner.active.is_measured
        result = runtime.rate(reply(runtime).request_id, "up")
        assert result.applied and result.logprob_after > result.logprob_before
        runtime.undo()
        runtime.learner.sync()
        assert runtime.learner.version == 0 and not runtime.learner.micro.lora_b.any()


def test_another_model_has_no_file(tiny):
    assert shipped_bytes("probes", tiny.fingerprint) is None
    assert not shipped_path("probes", tiny.fingerprint).exists()


@pytest.mark.full
def test_the_shipped_probe_is_what_the_starter_measures(starter, backend, shipped_probe):
    """Processors round in different ways, so the replies of the starter differ, which the probe measures."""
    own = calibration.measure(backend, starter.tokenizer, 2, starter.shape.max_context)
    common = np.intersect1d(own.tokens, shipped_probe.tokens)
    assert common.size > 0.9 * own.tokens.size
    pairs = own.directions.T, shipped_probe.directions.T
    lengths = np.linalg.norm(pairs, axis=-1)
    assert (np.vecdot(*pairs) > 0.95 * lengths[0] * lengths[1]).all()
    np.testing.assert_allclose(*lengths, rtol=0.05)


@pytest.mark.full
def test_the_shipped_whitening_is_what_the_starter_measures(starter, backend):
    data = shipped_bytes("whitenings", starter.fingerprint)
    shipped = embedding.Whitening.from_bytes(data, starter.shape.hidden_size)
    own = embedding.measure(backend, starter.tokenizer)
    states = np.stack(
        [embedding.read_question(backend, starter.tokenizer, text) for text in embedding.everyday_questions()]
    )
    assert np.vecdot(own(states), shipped(states)).min() > 0.999


def test_small_numbers_change_no_distance(tiny, tiny_backend, tiny_neutral):
    """float16 for the contexts and features: the KL of adapters moves by less than a hundredth."""
    eos = np.array(sorted(tiny.tokenizer.eos_ids))
    exact = KLProbe.from_bytes(tiny_neutral, tiny_backend.head, eos)
    data = exact.to_bytes(is_small=True)
    small = KLProbe.from_bytes(data, tiny_backend.head, eos)
    assert len(data) < 0.6 * len(tiny_neutral) and small.contexts.dtype == np.float32
    for size in (0.01, 0.1, 1.0):
        adapter = adapter_of_size(exact, size)
        assert small.kl(adapter) == pytest.approx(exact.kl(adapter), rel=0.01)


@pytest.mark.parametrize("rows, vocab", [(1, 7), (64, 50), (131, 33)])
def test_a_survey_in_float32_is_that_in_float64(rows, vocab):
    rng = np.random.default_rng(rows)
    states, matrix = rng.normal(size=(rows, 5)).astype(np.float32), rng.normal(size=(5, vocab)) * 4
    found = Survey(states, [2, 5]).run(lambda h: (h @ matrix).astype(np.float32), lambda: None)
    z = (states @ matrix).astype(np.float32).astype(np.float64)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.frequency, p.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.cost, (p * (1 - p)).mean(axis=0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.ending, np.log(p[:, [2, 5]].sum(axis=1) + 1e-5), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(softmax_rows(z.astype(np.float32)), p, rtol=1e-5, atol=1e-8)
