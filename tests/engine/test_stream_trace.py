"""Adapter and trace of a stream equal those computed from every token's logits."""

import functools

import numpy as np
import pytest

from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.mlx import stream
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.engine import Sampling
from ruvmlx.engine.run import Run
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx
from ruvmlx.sona.trace import Trace
from tests.models.make_models import make_safetensors_model
from tests.sona.test_trace import random_adapter

from .test_engine import request
from .test_stream import CACHES, SMALL, engines, open_streaming


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {"full": load_model(str(make_safetensors_model(tmp_path_factory.mktemp("trace") / "full")))}


@pytest.fixture(scope="module")
def full_backend(models) -> MLXBackend:
    return open_streaming(models["full"])


def trace_reply(engine, adapter, **fields):
    trace = Trace(adapter, 1)
    some = request(max_new_tokens=150, sampling=Sampling(0.7, seed=5), **fields)
    return engine.generate(some, adapter, trace), trace


def assert_near(one, two):
    np.testing.assert_allclose(one, two, atol=1e-5 * np.abs(two).max(), rtol=0)


def assert_same_trace(one: Trace, two: Trace) -> None:
    assert one.tokens == two.tokens
    for name in ("grad_a", "grad_b", "hidden_states", "logprob", "frozen_logprob"):
        assert_near(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("policy", CACHES.values(), ids=CACHES)
def test_the_trace_is_that_of_every_token(models, full_backend, policy, monkeypatch):
    """An adapter that changes what is drawn; an end token is part of the trace, not of the reply."""
    adapter, (with_, without) = random_adapter(full_backend.config), engines(models, full_backend, policy)
    (one, trace), (two, other) = trace_reply(with_, adapter), trace_reply(without, adapter)
    assert (
        one.token_ids
        == two.token_ids
        != trace_reply(with_, MicroLoRA.fresh(adapter.lora_a, 320))[0].token_ids
    )
    assert_same_trace(trace, other)
    end = one.token_ids[20]
    monkeypatch.setattr(models["full"].tokenizer, "eos_ids", frozenset([end]))
    (one, trace), (_, other) = (trace_reply(e, adapter, ignore_eos=False) for e in (with_, without))
    assert one.finish_reason == "stop" and trace.tokens == [*one.token_ids, end]
    assert_same_trace(trace, other)


def test_a_trace_in_pieces_is_the_same(models, full_backend):
    """As drafts take it, at any time."""
    adapter, (engine, _) = random_adapter(full_backend.config), engines(models, full_backend, SMALL)
    _, want = trace_reply(engine, adapter)
    trace = Trace(adapter, 1)
    run = Run(engine, request(max_new_tokens=150, sampling=Sampling(0.7, seed=5)), adapter, trace)
    for i, _ in enumerate(run.chunks()):
        if i in (1, 2, 40, 111):
            run.record()
            assert trace.tokens == run.drawn and len(trace.tokens) == i
    assert_same_trace(trace, want)


def test_logprobs_come_from_the_traces_logits(models, full_backend):
    """Of every token of the reply, from the same logits as the trace."""
    adapter = random_adapter(full_backend.config)
    one, two = (
        e.generate(request(logprobs=3, max_new_tokens=70), adapter) for e in engines(models, full_backend)
    )
    assert len(one.logprobs) == 70
    for a, b in zip(one.logprobs, two.logprobs, strict=True):
        assert a.token_id == b.token_id and [i for i, _ in a.top] == [i for i, _ in b.top]
        assert_near([a.logprob, *(p for _, p in a.top)], [b.logprob, *(p for _, p in b.top)])


def test_an_adapter_is_put_on_the_device_once(full_backend, monkeypatch):
    """Known by the object, held no longer than it; another object is another adapter."""
    made = []
    monkeypatch.setattr(
        stream, "HeadChange", lambda adapter, make=stream.HeadChange: made.append(1) or make(adapter)
    )
    one, two = (random_adapter(full_backend.config, seed=s) for s in (1, 2))
    for adapter in (one, one, two, two, None, two):
        full_backend._micro.of(adapter)
    assert len(made) == 2
    del two, adapter
    assert full_backend._micro._change is None


def test_a_fresh_adapter_costs_nothing(full_backend):
    """lora_b is zero until the first rating."""
    fresh = MicroLoRA.fresh(
        np.ones((full_backend.config.hidden_size, 2), np.float32), full_backend.config.vocab_size
    )
    logits, hidden = mx.zeros((1, 320)), mx.ones((1, 64))
    assert full_backend._micro.of(fresh)(logits, hidden) is logits
    assert_near(
        np.array(stream.HeadChange(a := random_adapter(full_backend.config))(logits, hidden)),
        a.scale * np.ones((1, 64)) @ a.lora_a @ a.lora_b,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("policy", CACHES.values(), ids=CACHES)
def test_sixteen_bits_give_the_traces_logits(tmp_path, monkeypatch, dtype, policy):
    """What a GPU runs, on the CPU. The trace's logits, many tokens in one product, round otherwise."""
    model = load_model(str(make_safetensors_model(tmp_path / "m", dtype=dtype, bits=4, group_size=32)))
    as_on_metal = functools.partial(mlx.plan, device="metal")
    monkeypatch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
    backend = open_streaming(model)
    adapter = random_adapter(backend.config)
    (one, trace), (two, other) = (
        trace_reply(engine, adapter) for engine in engines({"m": model}, backend, policy)
    )
    assert one.token_ids == two.token_ids
    assert trace.logprob == pytest.approx(other.logprob, rel=1e-2)
    assert np.abs(trace.grad_b - other.grad_b).max() < 2e-2 * np.abs(other.grad_b).max()
