"""Demotion: kernel, twin and NumPy give the same bytes."""

import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels import demote
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import COLD, HOT, PAGE, WARM

from . import make
from .kernels import DIMS


def numbers(rng, d, kind):
    x = make.numbers(rng, PAGE, d)
    if kind == "ties":  # multiples of half a step: every rounding is a tie
        x = np.float32(rng.integers(-20, 21, (PAGE, d))) / 2
        x[:, 0], x[:, 1], x[0], x[1] = 127 / 2, -127 / 2, -3, 4.5
    if kind == "constant":
        x = np.full_like(x, rng.choice([0.1, -7, 0]))
    if kind == "tiny":  # scales become subnormal halves, or zero
        x *= np.float32(10.0) ** rng.integers(-9, -3, (PAGE, 1))
    if kind == "huge":
        x = np.clip(x * 2000, -8000, 8000)
    return x


KINDS = ("plain", "ties", "constant", "tiny", "huge")


def pool_of(rng, tier, d, n=3, n_kv=2):
    """[n * 5, n_kv, bytes], one kind of content after the other."""
    pages = [
        [make.pack(tier, numbers(rng, d, kind), numbers(rng, d, kind)) for _ in range(n_kv)]
        for kind in KINDS
        for _ in range(n)
    ]
    return np.array(pages)


def stored(tier, page, d):
    """What demotion reads: float32."""
    return [x.astype(np.float32) for x in make.unpack(tier, page, d)]


@pytest.mark.parametrize("d", DIMS)
def test_hot_to_warm(run, d):
    rng = np.random.default_rng(d)
    hot, ids = pool_of(rng, HOT, d), [14, 0, 5, 7, 9, 12, 3]
    want = np.array([[make.pack(WARM, *stored(HOT, page, d)) for page in hot[i]] for i in ids])
    np.testing.assert_array_equal(demote.demote_gpu(hot, ids, d, WARM, run), want)
    np.testing.assert_array_equal(demote.demote_ops(mx.array(hot[ids]), d, WARM), want)


@pytest.mark.parametrize("d", DIMS)
def test_warm_to_cold(run, d):
    rng = np.random.default_rng(d + WARM)
    pool, ids = pool_of(rng, WARM, d), [14, 0, 5, 7, 9, 12, 3]

    def cold(page):
        k, v = stored(WARM, page, d)
        return make.pack(COLD, rotated_float32(k), v)

    want = np.array([[cold(page) for page in pool[i]] for i in ids])
    np.testing.assert_array_equal(demote.demote_gpu(pool, ids, d, COLD, run), want)
    np.testing.assert_array_equal(demote.demote_ops(mx.array(pool[ids]), d, COLD), want)


def rotated_float32(x):
    """By the definition, a pair at a time, in float32."""
    x, block, h = x.copy(), {64: 64, 80: 16, 128: 128, 256: 128}[x.shape[1]], 1
    while h < block:
        for i in range(x.shape[1]):
            if not i & h:
                x[:, i], x[:, i + h] = x[:, i] + x[:, i + h], x[:, i] - x[:, i + h]
        h *= 2
    return x * np.float32(block**-0.5)


@pytest.mark.parametrize("d", DIMS)
def test_rotation_is_orthonormal_and_its_own_inverse(d):
    x = np.random.default_rng(d).normal(size=(5, 3, d)).astype(np.float32)
    once = demote.rotate(mx.array(x))
    np.testing.assert_allclose(np.linalg.norm(once, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(demote.rotate(once), x, atol=1e-5)
    assert np.abs(np.array(once) - x).max() > 0.5


@pytest.mark.parametrize("d", DIMS)
def test_rotation_is_the_one_that_mlx_has(d):
    """MLX's own transform is an oracle of its own."""
    x = mx.array(np.random.default_rng(d).normal(size=(5, 3, d)).astype(np.float32))
    theirs = mx.hadamard_transform(x.reshape(-1, demote.hadamard_block(d))).reshape(x.shape)
    np.testing.assert_allclose(demote.rotate(x), theirs, atol=1e-5)


@pytest.mark.parametrize("d", DIMS)
def test_rotated_queries_score_rotated_keys(d):
    """(H q) . (H k) = q . k"""
    q, k = np.random.default_rng(d).normal(size=(2, 40, d)).astype(np.float32)
    got = np.array(demote.rotate(mx.array(q))) @ np.array(demote.rotate(mx.array(k))).T
    np.testing.assert_allclose(got, q @ k.T, atol=1e-4)


def test_order_of_threads_does_not_matter(run):
    pool = pool_of(np.random.default_rng(1), WARM, 80, n=1)
    results = set()
    for seed in range(20):
        seeded = lambda *a, seed=seed: run(*a, seed=seed)  # noqa: E731
        results.add(demote.demote_gpu(pool, [1, 3], 80, COLD, seeded).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("d", DIMS)
def test_error_is_within_half_a_step(d):
    """What a user of the cache gets: |x - stored| <= step / 2, and a little for the f16 scale and bias."""
    rng = np.random.default_rng(d)
    x = numbers(rng, d, "plain").astype(np.float16).astype(np.float32)
    hot = mx.array(make.pack(HOT, x, x)[None])
    warm = demote.demote_ops(hot, d, WARM)
    k, v = make.unpack(WARM, np.array(warm)[0], d)
    assert (np.abs(k - x) <= np.abs(x).max(axis=1, keepdims=True) / 127 * 0.57 + 1e-6).all()
    cold_k, cold_v = make.unpack(COLD, np.array(demote.demote_ops(warm, d, COLD))[0], d)
    for got, given in ((cold_k, rotated_float32(k.astype(np.float32))), (cold_v, v)):
        assert (np.abs(got - given) <= np.ptp(given, axis=1)[:, None] / 15 * 0.52 + 8e-3).all()
