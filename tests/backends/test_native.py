"""The native backend against the NumPy oracle, and what it promises beyond the protocol."""

import ctypes
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.errors import RuvmlxError, UsageError
from ruvmlx.kernels import decoder as c_decoder
from ruvmlx.kernels.decoder import MODULES, Cancelled
from ruvmlx.kernels.matmul import implementations as matmul_implementations
from ruvmlx.models.load import load_model
from tests.models.make_gguf import make_gguf_model
from tests.models.make_models import make_safetensors_model

from .exact_prompts import ExactPrompts
from .test_agreement import SHAPES, SIZES, STORED, TOKENS, walk, worst

# Largest difference of any logit, as a share of the largest logit. Keys and values are rounded to float16
# (2^-11), activations in front of packed weights to 16 bits; the oracle keeps both in float32.
TOLERANCE = 1e-3
# 8-bit activations, for comparison.
COARSE_TOLERANCE = 4e-2

# GQA ratios 1, 2, 3, 4 and 8; head sizes 32, 64, 80 and 128; groups of 32, 64 and 128 in unequal matrices.
HEADS = {
    "1x32": {"n_heads": 3, "n_kv_heads": 3, "head_dim": 32},
    "2x64": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64},
    "3x80": {"n_heads": 6, "n_kv_heads": 2, "head_dim": 80},
    "4x128": {"n_heads": 4, "n_kv_heads": 1, "head_dim": 128},
    "8x64": {"n_heads": 16, "n_kv_heads": 2, "head_dim": 64},
}


def made(tmp_path, **kwargs):
    return load_model(str(make_safetensors_model(tmp_path / "m", **kwargs)))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_oracle(tmp_path, shape, stored):
    """Odd chunks, decode, verify, trim and continue; window, Llama-3 rope, biases, tied; every format."""
    model = made(tmp_path, **SHAPES[shape], **STORED[stored])
    oracle = ReferenceBackend(model)
    want = oracle.verify(TOKENS, oracle.new_cache())
    ours = walk(ExactPrompts(model, threads=2, chunk=37), TOKENS)
    assert len(ours) > 110
    assert worst(ours, want) < TOLERANCE


@pytest.mark.parametrize("stored", ["float32", "4-bit"])
@pytest.mark.parametrize("heads", HEADS)
def test_every_grouping_and_size_of_heads_agrees(tmp_path, heads, stored):
    """Every grouping of heads and every head size."""
    sizes = {"hidden_size": 192, "n_layers": 2, "intermediate_size": 320}
    model = made(tmp_path, **sizes, **HEADS[heads], **STORED[stored])
    oracle = ReferenceBackend(model)
    want = oracle.verify(TOKENS, oracle.new_cache())
    assert worst(walk(ExactPrompts(model, threads=2, chunk=50), TOKENS), want) < TOLERANCE


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_a_gguf_model_runs(tmp_path, quant):
    model = load_model(str(make_gguf_model(tmp_path / "m.gguf", quant=quant, **SIZES)))
    oracle = ReferenceBackend(model)
    want = oracle.verify(TOKENS[:90], oracle.new_cache())
    backend = NativeBackend(model)
    assert worst(dict(enumerate(backend.verify(TOKENS[:90], backend.new_cache()))), want) < TOLERANCE


@pytest.mark.parametrize("impl", matmul_implementations())
def test_every_instruction_set(tmp_path, impl):
    """All of them within rounding of the oracle; the name is the one asked for."""
    model = made(tmp_path, **SIZES, **STORED["4-bit"])
    oracle = ReferenceBackend(model)
    want = oracle.verify(TOKENS[:70], oracle.new_cache())
    backend = NativeBackend(model, impl=impl)
    assert f"native {impl}, " in backend.kernels
    assert worst(dict(enumerate(backend.verify(TOKENS[:70], backend.new_cache()))), want) < TOLERANCE


def test_eight_bits_alone_are_coarser(tmp_path, monkeypatch):
    """What the second term of the activations is for."""
    from ruvmlx.backends.native import backend as native

    model = made(tmp_path, **SIZES, **STORED["4-bit"])
    oracle = ReferenceBackend(model)
    want = oracle.verify(TOKENS, oracle.new_cache())

    def coarse(*args, **kwargs):
        return decoder(*args, **kwargs, precise=False)

    decoder = native.Decoder
    monkeypatch.setattr(native, "Decoder", coarse)
    backend = NativeBackend(model)
    error = worst(dict(enumerate(backend.verify(TOKENS, backend.new_cache()))), want)
    assert 2 * TOLERANCE < error < COARSE_TOLERANCE


@pytest.mark.parametrize("stored", ["float16", "4-bit"])
def test_threads_do_not_change_a_bit(tmp_path, stored):
    """1, 2, 3 and 8 threads: the same logits in prefill, decode over several key ranges, and verify."""
    model = made(tmp_path, **SIZES, **STORED[stored])
    rows = []
    for threads in (1, 2, 3, 8):
        backend = NativeBackend(model, threads=threads, chunk=128)
        cache = backend.new_cache()
        steps = [
            backend.prefill(TOKENS, cache).logits,
            *(backend.decode(t, cache).logits for t in TOKENS[:9]),
        ]
        rows.append(np.concatenate([np.stack(steps), backend.verify(TOKENS[:5], cache)]))
    for other in rows[1:]:
        np.testing.assert_array_equal(rows[0], other)


@pytest.mark.parametrize("stored", ["4-bit", "8-bit"])
def test_a_prompt_has_the_same_bits_in_any_pieces(tmp_path, stored):
    """A request that is sent again reads only the end of its prompt: its answer stays the same."""
    backend, prompt = NativeBackend(made(tmp_path, **SIZES, **STORED[stored])), TOKENS * 3
    whole = backend.prefill(prompt, backend.new_cache()).logits
    for last in (1, 2, 7, 8, 9, 16):
        cache = backend.new_cache()
        backend.prefill(prompt[:-last], cache)
        np.testing.assert_array_equal(backend.prefill(prompt[-last:], cache).logits, whole)


def test_a_replayed_trace_equals_the_live_one(tmp_path):
    """head(hidden) gives the very logits of the step that the hidden state came from."""
    backend = NativeBackend(made(tmp_path, **SIZES, **STORED["4-bit"]))
    cache = backend.new_cache()
    steps = [backend.prefill(TOKENS[:30], cache), *(backend.decode(t, cache) for t in TOKENS[30:70])]
    live = np.stack([s.logits for s in steps])
    np.testing.assert_array_equal(backend.head(np.stack([s.hidden for s in steps])), live)
    np.testing.assert_array_equal(backend.head(steps[3].hidden), live[3])


def test_verify_equals_step_by_step(tmp_path):
    backend = NativeBackend(made(tmp_path, **SHAPES["mistral-window-64"], **STORED["8-bit"]))
    one, other = backend.new_cache(), backend.new_cache()
    for cache in (one, other):
        backend.prefill(TOKENS[:100], cache)
    steps = np.stack([backend.decode(t, one).logits for t in TOKENS[100:120]])
    np.testing.assert_allclose(backend.verify(TOKENS[100:120], other), steps, atol=2e-4)


def merged(model, deltas):
    """The oracle with W + scale (A B)^T in place of W."""
    oracle = ReferenceBackend(model)
    for (module, layer), (a, b, scale) in deltas.items():
        part = "mlp" if module in MODULES[4:] else "self_attn"
        name = "lm_head" if module == "lm_head" else f"model.layers.{layer}.{part}.{module}"
        oracle._weights[f"{name}.weight"] = oracle._weights[f"{name}.weight"] + scale * (a @ b).T
    return oracle


@pytest.mark.parametrize("stored", ["float32", "4-bit"])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_lora_on_every_linear_layer(tmp_path, rank, stored):
    """Prefill and decode with the slots filled equal the merged weights; emptied, the bits come back."""
    model = made(tmp_path, **SIZES, **STORED[stored])
    backend, rng = ExactPrompts(model, threads=2), np.random.default_rng(rank)
    before = backend.verify(TOKENS[:40], backend.new_cache())
    deltas = {}
    for layer, module in [(i % 3, m) for i, m in enumerate((*MODULES, "lm_head"))]:
        width, out = backend.decoder.lora_shape(module)
        a, b = (rng.normal(0, 0.2, s).astype(np.float32) for s in ((width, rank), (rank, out)))
        deltas[module, layer] = (a, b, 0.5)
        backend.decoder.set_lora(module, layer, a, b, 0.5)
    oracle = merged(model, deltas)
    want = oracle.verify(TOKENS[:40], oracle.new_cache())
    assert worst(walk_short(backend), want) < TOLERANCE
    assert np.abs(want - before).max() > 0.1
    for module, layer in deltas:
        backend.decoder.set_lora(module, layer, None, None)
    np.testing.assert_array_equal(backend.verify(TOKENS[:40], backend.new_cache()), before)


def walk_short(backend):
    cache = backend.new_cache()
    rows = dict(enumerate(backend.verify(TOKENS[:23], cache)))
    rows |= {i: backend.decode(TOKENS[i], cache).logits for i in range(23, 30)}
    rows[39] = backend.prefill(TOKENS[30:40], cache).logits
    return rows


def test_lora_shapes_are_checked(tmp_path):
    backend = NativeBackend(made(tmp_path, **SIZES))
    a, b = np.zeros((64, 2), np.float32), np.zeros((2, 7), np.float32)
    with pytest.raises(ValueError, match="o_proj maps 96 to 64"):
        backend.decoder.set_lora("o_proj", 0, a, b)
    with pytest.raises(ValueError, match="set_lora"):
        backend.decoder.set_lora("q_proj", 3, a, np.zeros((2, 96), np.float32))


def test_no_memory_for_a_lora(tmp_path, monkeypatch):
    backend = NativeBackend(made(tmp_path, **SIZES))
    a, b = np.zeros((96, 2), np.float32), np.zeros((2, 64), np.float32)
    monkeypatch.setattr(c_decoder._lib(), "rvm_decoder_set_lora", lambda *_: c_decoder.NO_MEMORY)
    with pytest.raises(RuvmlxError, match="no memory for the LoRA"):
        backend.decoder.set_lora("o_proj", 0, a, b)


def test_a_cancelled_call_leaves_the_cache_as_it_was(tmp_path):
    """A raised flag stops the call; the cache is as it was, and going on is exact."""
    backend = NativeBackend(made(tmp_path, **SIZES))
    cache, fresh = backend.new_cache(), backend.new_cache()
    backend.prefill(TOKENS[:50], cache)
    with pytest.raises(Cancelled):
        cache.reserve(40)
        backend.decoder.forward(TOKENS[50:90], cache.table, 50, cancel=ctypes.c_int(1))
    assert cache.offset == 50
    got, want = backend.prefill(TOKENS[50:90], cache), backend.prefill(TOKENS[:90], fresh)
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-3)


@pytest.mark.parametrize("how", ["progress", "ctrl-c"])
def test_a_long_chunk_stops_within_200_ms(starter, how):
    """In the middle of one call of seconds; the cache holds no part of it and can be used again.

    The best of three: other processes may keep ours from running for a while.
    """
    backend = NativeBackend(starter, chunk=8192)
    cache = backend.new_cache()
    backend.prefill([1, 2, 3], cache)
    late = []
    while len(late) < 3 and not (late and late[-1] < 0.2):
        late.append(stop_late(backend, cache, how))
        assert cache.offset == 3
    assert min(late) < 0.2
    assert np.isfinite(backend.decode(4, cache).logits).all()


def stop_late(backend, cache, how):
    """Stop a prefill 0.2 s after its start; seconds from there to its return."""
    when, start = [], time.monotonic()

    def stop(done):
        if how == "progress" and done == 0 and time.monotonic() > start + 0.2:
            when.append(time.monotonic())
            raise KeyboardInterrupt

    def interrupt():
        when.append(time.monotonic())
        signal.raise_signal(signal.SIGINT)

    if how == "ctrl-c":
        threading.Timer(0.2, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        backend.prefill([5] * 8000, cache, progress=stop)
    return time.monotonic() - when[0]


def test_one_call_at_a_time(starter):
    """A second call, from another thread, is an error in words; the first one is not disturbed."""
    backend, errors = NativeBackend(starter, chunk=4096), []

    def second(done):
        if not errors:
            with pytest.raises(RuvmlxError, match="already at work") as error:
                backend.decode(3, backend.new_cache())
            errors.append(error)

    step = backend.prefill([7] * 2500, backend.new_cache(), progress=second)
    assert errors and np.isfinite(step.logits).all()


def test_memory_of_a_cache(tmp_path):
    """Pages of 64 tokens of float16, given back by trim and with the cache."""
    backend = NativeBackend(made(tmp_path, **SIZES), chunk=64)
    page = 64 * 3 * 2 * (16 + 16) * 2  # tokens, layers, heads, k and v, bytes
    cache = backend.new_cache()
    for i in range(5):
        backend.prefill(TOKENS[:64], cache)
        assert cache.nbytes - cache.table.nbytes == (i + 1) * page
    assert cache.trim(300)
    assert cache.nbytes - cache.table.nbytes == page
    assert backend.pool.nbytes == page
    assert not cache.trim(21)
    assert cache.trim(20)


def test_weights_stay_alive(tmp_path):
    """The backend holds what the C side points to, and a cache its decoder."""
    backend = NativeBackend(made(tmp_path, **SIZES))
    cache = backend.new_cache()
    want = backend.prefill(TOKENS, cache).logits
    gc.collect()
    junk = [np.full(1 << 16, 7, np.uint8) for _ in range(50)]
    fresh = backend.new_cache()
    np.testing.assert_array_equal(backend.prefill(TOKENS, fresh).logits, want)
    del backend, junk
    gc.collect()
    assert cache.trim(3)


def test_a_forked_child_computes_too(tmp_path):
    """Threads do not survive a fork; the child starts its own."""
    backend = NativeBackend(made(tmp_path, **SIZES), threads=3)
    want = backend.prefill(TOKENS, backend.new_cache()).logits
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            got = backend.prefill(TOKENS, backend.new_cache()).logits
            status = int(not np.array_equal(got, want))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(backend.prefill(TOKENS, backend.new_cache()).logits, want)


def test_wrong_calls_are_refused(tmp_path):
    backend = NativeBackend(made(tmp_path, **SIZES))
    with pytest.raises(UsageError, match="token 320 is outside"):
        backend.decode(320, backend.new_cache())
    with pytest.raises(ValueError, match="refuses"):
        NativeBackend(made(tmp_path / "b", **SIZES), impl="avx1024")
