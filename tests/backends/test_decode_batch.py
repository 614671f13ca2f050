"""One step of several sequences is one step of each of them alone."""

from functools import partial

import numpy as np
import pytest

from ruvmlx.backends.coarse import decode_coarse
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.errors import RuvmlxError, UsageError
from ruvmlx.kernels.decoder import Cancelled
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.models.load import load_model
from ruvmlx.tiers import EVERYTHING
from tests.models.make_models import make_safetensors_model

from .test_agreement import SHAPES, STORED, TOKENS

POLICIES = {
    "f16": None,
    "warm": TierPolicy("tiered", (64, EVERYTHING)),
    "cold": TierPolicy("tiered", (64, 128)),
}
LENGTHS = (130, 1, 64, 39, 127, 3, 90)
# Largest difference of any logit over the largest: float32 sums of several rows have another order.
TOLERANCE = 2e-6
COARSE_TOLERANCE = 0.1  # the same with activations of 8 bits, which a random model keeps for 80 tokens


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def made(tmp_path, **kwargs):
    return load_model(str(make_safetensors_model(tmp_path / "m", **kwargs)))


def filled(backend, policy=None):
    caches = [backend.new_cache(policy) for _ in LENGTHS]
    for i, (cache, n) in enumerate(zip(caches, LENGTHS, strict=True)):
        backend.prefill(TOKENS[i : i + n], cache)
    return caches


def walked(backend, step, policy=None, adapter=None, steps=70):
    """Logits and hidden states of every step and sequence; a changing part of them takes part each time."""
    caches, out = filled(backend, policy), []
    for i in range(steps):
        chosen = caches[i % 3 :: 1 + i % 2]
        tokens = TOKENS[i : i + len(chosen)]
        rows = step(tokens, chosen, adapter)
        out += [np.concatenate([row.logits, row.hidden]) for row in rows]
    assert len({cache.offset for cache in caches}) > 3
    return np.stack(out)


def one_by_one(backend):
    return lambda tokens, caches, adapter: [
        backend.decode(t, c, adapter) for t, c in zip(tokens, caches, strict=True)
    ]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_native_quantised_rows_have_the_bits_that_they_have_alone(tmp_path, shape, policy, threads):
    """Windows, biases and tiers included; batches over a call's most rows, too."""
    backend = NativeBackend(made(tmp_path, **shape, **STORED["4-bit"]), threads=threads, chunk=5)
    want = walked(backend, one_by_one(backend), POLICIES[policy])
    np.testing.assert_array_equal(walked(backend, backend.decode_batch, POLICIES[policy]), want)


@pytest.mark.parametrize("stored", STORED)
def test_coarse_rows_are_near_the_exact_ones_and_do_not_depend_on_each_other(tmp_path, shape, stored):
    """The twin in C, a decoder whose activations always have 8 bits, is in neon/tests/decoder_batch.c."""
    backend = NativeBackend(made(tmp_path, **shape, **STORED[stored]), threads=2, chunk=5)
    exact = walked(backend, backend.decode_batch, steps=10)
    got = walked(backend, backend.decode_coarse, steps=10)
    assert np.abs(got - exact).max() < COARSE_TOLERANCE * np.abs(exact).max()
    if "bit" not in stored:
        return
    assert (got != exact).any()
    alone = walked(
        backend,
        lambda tokens, caches, adapter: [
            backend.decode_coarse([t], [c], adapter)[0] for t, c in zip(tokens, caches, strict=True)
        ],
        steps=10,
    )
    np.testing.assert_array_equal(got, alone)


def test_a_backend_without_coarse_steps_makes_exact_ones(tmp_path):
    backend = ReferenceBackend(made(tmp_path))
    step = partial(decode_coarse, backend)
    np.testing.assert_array_equal(
        walked(backend, step, steps=3), walked(backend, backend.decode_batch, steps=3)
    )


@pytest.mark.parametrize("stored", STORED)
def test_native_rows_in_every_format(tmp_path, shape, stored):
    backend = NativeBackend(made(tmp_path, **shape, **STORED[stored]), threads=2)
    want = walked(backend, one_by_one(backend), steps=10)
    got = walked(backend, backend.decode_batch, steps=10)
    assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_forks_that_read_shared_pages_once_have_the_bits_that_they_have_alone(
    tmp_path, shape, policy, threads
):
    """Forks of two prompts and a sequence without forks; some are a token ahead; own pages in every tier."""
    backend = NativeBackend(made(tmp_path, **shape, **STORED["4-bit"]), threads=threads)

    def forks(step):
        out, caches = [], []
        for start, n, count in ((0, 130, 6), (5, 200, 4), (9, 70, 1)):
            first = backend.new_cache(POLICIES[policy])
            backend.prefill(TOKENS[start : start + n], first)
            caches += [first, *(first.fork() for _ in range(count - 1))]
        backend.decode(TOKENS[0], caches[2])
        for i in range(150):
            chosen = caches[i % 2 :: 1 + (i % 50 == 49)]
            rows = step([TOKENS[(i + 7 * j) % 60] for j in range(len(chosen))], chosen, None)
            out += [np.concatenate([row.logits, row.hidden]) for row in rows]
        return np.stack(out)

    np.testing.assert_array_equal(forks(backend.decode_batch), forks(one_by_one(backend)))


@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend, MLXBackend])
def test_a_batch_adds_the_adapter_as_single_rows_do(tmp_path, shape, kind):
    backend = kind(made(tmp_path, **shape, **STORED["8-bit"]))
    rng, c = np.random.default_rng(0), backend.config
    a, b = rng.normal(size=(c.hidden_size, 3)), rng.normal(size=(3, c.vocab_size))
    adapter = MicroLoRA(a.astype(np.float32), b.astype(np.float32))
    want = walked(backend, one_by_one(backend), adapter=adapter, steps=6)
    got = walked(backend, backend.decode_batch, adapter=adapter, steps=6)
    if kind is MLXBackend:  # its sums on the CPU depend on where arrays lie
        assert np.abs(got - want).max() < 5 * TOLERANCE * np.abs(want).max()
    else:
        np.testing.assert_array_equal(got, want)
    assert (got != walked(backend, backend.decode_batch, steps=6)).any()


def test_forks_go_on_without_each_other(tmp_path):
    """Sequences that share pages: each row writes into its own copy of the last one."""
    backend = NativeBackend(made(tmp_path, **STORED["4-bit"]), threads=2)
    first = filled(backend)[0]
    caches = [first, first.fork(), first.fork()]
    got = [backend.decode_batch(TOKENS[i : i + 3], caches) for i in range(4)]
    for row in range(3):
        cache = filled(backend)[0]
        for i in range(4):
            want = backend.decode(TOKENS[i + row], cache).logits
            np.testing.assert_array_equal(got[i][row].logits, want)


@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend, MLXBackend])
@pytest.mark.parametrize("bad", [[1, 2, -1], [320, 1, 2]])
def test_a_bad_token_is_refused(tmp_path, kind, bad):
    backend = kind(made(tmp_path))
    with pytest.raises(UsageError, match="vocabulary"):
        backend.decode_batch(bad, filled(backend)[:3])


@pytest.mark.parametrize("failure", [MemoryError, Cancelled, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["reserve", "step"])
def test_a_failure_leaves_all_as_they_were(tmp_path, monkeypatch, failure, where):
    """The second sequence finds no room, or the step ends early."""
    backend = NativeBackend(made(tmp_path, **STORED["4-bit"]), threads=2)
    caches, fresh = filled(backend), filled(backend)

    def fails(*_, **__):
        raise failure

    with monkeypatch.context() as m:
        m.setattr(caches[1] if where == "reserve" else backend.decoder, where, fails)
        with pytest.raises(failure):
            backend.decode_batch(TOKENS[:7], caches)
    assert [c.offset for c in caches] == list(LENGTHS)
    assert [c.nbytes for c in caches] == [c.nbytes for c in fresh]
    want = backend.decode_batch(TOKENS[:7], fresh)
    for one, other in zip(backend.decode_batch(TOKENS[:7], caches), want, strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)


def test_nan_is_an_error(tmp_path):
    model = made(tmp_path, **STORED["4-bit"])
    weights = dict(model.load_weights())
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    model.load_weights = lambda: weights
    backend = NativeBackend(model)
    with pytest.raises(RuvmlxError, match="NaN"):
        backend.decode_batch([1, 2], [backend.new_cache(), backend.new_cache()])


def test_tables_that_are_too_short(tmp_path):
    """C does not know where a table ends."""
    backend = NativeBackend(made(tmp_path))
    cache = filled(backend)[0]
    with pytest.raises(ValueError, match="too short"):
        backend.decoder.step([1, 2], [cache.table] * 2, [5, 1 << 20])
    with pytest.raises(ValueError, match="bad argument"):
        backend.decoder.step([1, 2], [cache.table] * 2, [5, 300])
    with pytest.raises(ValueError, match="empty"):
        backend.decoder.step([], [], [])
