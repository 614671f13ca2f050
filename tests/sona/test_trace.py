"""The trace is the gradient of the reply's log-probability, exactly."""

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.lora import MicroLoRA
from ruvmlx.sona.trace import Trace


def random_adapter(config, rank=2, seed=3) -> MicroLoRA:
    """An adapter that changes the logits: neither factor is zero."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(config.hidden_size, rank)).astype(np.float32) * 0.1
    b = rng.normal(size=(rank, config.vocab_size)).astype(np.float32) * 0.1
    return MicroLoRA(a, b)


def traced_reply(engine, adapter, temperature, tokens=23) -> Trace:
    trace = Trace(adapter, 1)
    request = GenerationRequest(
        prompt="The quick brown fox",
        max_new_tokens=tokens,
        sampling=Sampling(temperature=temperature, seed=5),
        ignore_eos=True,
    )
    engine.generate(request, adapter, trace)
    return trace


def reply_logprob(a, b, scale, hidden, frozen, tokens) -> float:
    """sum_t log p(y_t) in float64.  a [D, r], b [r, V], hidden [T, D], frozen logits [T, V]."""
    z = frozen + scale * (hidden @ a) @ b
    z = z - z.max(axis=1, keepdims=True)
    return float((z[np.arange(len(tokens)), tokens] - np.log(np.exp(z).sum(axis=1))).sum())


def central_difference(f, x, index, step=1e-5) -> float:
    high, low = x.copy(), x.copy()
    high[index] += step
    low[index] -= step
    return (f(high) - f(low)) / (2 * step)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_gradient_equals_finite_differences(engine, tiny, tiny_backend, temperature):
    """Every element of E_a and a sample of E_b, relative error under 1e-3."""
    adapter = random_adapter(tiny.config)
    trace = traced_reply(engine, adapter, temperature)
    hidden = trace.hidden_states.astype(np.float64)
    frozen = tiny_backend.head(trace.hidden_states).astype(np.float64)
    a, b = adapter.lora_a.astype(np.float64), adapter.lora_b.astype(np.float64)

    def of_a(a):
        return reply_logprob(a, b, adapter.scale, hidden, frozen, trace.tokens)

    def of_b(b):
        return reply_logprob(a, b, adapter.scale, hidden, frozen, trace.tokens)

    true_a = np.array([[central_difference(of_a, a, (d, k)) for k in range(2)] for d in range(a.shape[0])])
    drawn = [*sorted(set(trace.tokens))[:10], 0, 7, tiny.config.vocab_size - 1]
    true_b = np.array([[central_difference(of_b, b, (k, v)) for v in drawn] for k in range(2)])
    assert np.linalg.norm(trace.grad_a - true_a) < 1e-3 * np.linalg.norm(true_a)
    assert np.linalg.norm(trace.grad_b[:, drawn] - true_b) < 1e-3 * np.linalg.norm(true_b)
    assert np.linalg.norm(true_a) > 0.1 and np.linalg.norm(true_b) > 0.1


def test_logprobs_and_log_ratio_are_those_of_the_reply(engine, tiny, tiny_backend):
    adapter = random_adapter(tiny.config)
    trace = traced_reply(engine, adapter, 0.7)
    hidden, frozen = (
        trace.hidden_states.astype(np.float64),
        tiny_backend.head(trace.hidden_states).astype(np.float64),
    )
    live = reply_logprob(adapter.lora_a, adapter.lora_b, adapter.scale, hidden, frozen, trace.tokens)
    base = reply_logprob(adapter.lora_a, 0 * adapter.lora_b, adapter.scale, hidden, frozen, trace.tokens)
    assert trace.logprob == pytest.approx(live, rel=1e-5)
    assert trace.log_ratio == pytest.approx((live - base) / len(trace.tokens), abs=1e-5)


def test_a_trace_replayed_under_another_adapter_is_that_adapters_trace(engine, tiny, tiny_backend):
    """What was drawn under version 1 gives, replayed, the gradient that version 2 would have traced."""
    old, new = random_adapter(tiny.config, seed=3), random_adapter(tiny.config, seed=4)
    trace = traced_reply(engine, old, 0.7)
    replayed = trace.replay(new, 2, tiny_backend.head)
    expected = Trace(new, 2)
    for h, y in zip(trace.hidden_states, trace.tokens, strict=True):
        logits = tiny_backend.head(h[None])[0]
        new.add_to_logits(logits, h)
        expected.add(h, logits, y)
    np.testing.assert_allclose(replayed.grad_b, expected.grad_b, atol=1e-5)
    np.testing.assert_allclose(replayed.grad_a, expected.grad_a, atol=1e-4)
    assert replayed.drawn_logprob == pytest.approx(trace.logprob)
    assert 0 < replayed.importance <= 1


def test_bytes_and_back(engine, tiny, tiny_backend):
    adapter = random_adapter(tiny.config)
    trace = traced_reply(engine, adapter, 0.7)
    back = Trace.from_bytes(trace.to_bytes(), adapter)
    assert back is not None
    np.testing.assert_array_equal(back.grad_b, trace.grad_b)
    np.testing.assert_array_equal(back.hidden_states, trace.hidden_states)
    assert (back.tokens, back.logprob) == (trace.tokens, trace.logprob)


def test_damaged_bytes_are_refused_not_trusted(engine, tiny, tiny_backend):
    """A trace that cannot be read is None: the caller replays the reply from its tokens."""
    adapter = random_adapter(tiny.config)
    data = traced_reply(engine, adapter, 0.7, tokens=3).to_bytes()
    assert Trace.from_bytes(data[: len(data) // 2], adapter) is None
    assert Trace.from_bytes(b"", adapter) is None
    middle = len(data) // 2
    assert Trace.from_bytes(data[:middle] + b"\xff" * 8 + data[middle + 8 :], adapter) is None
