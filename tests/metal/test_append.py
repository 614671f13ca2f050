"""RoPE and the rows of hot pages: a prompt's (append), and those of single new tokens (rope_append)."""

import ml_dtypes
import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels import append, rope_append
from ruvmlx.backends.mlx.kernels.demote import rotate
from ruvmlx.backends.mlx.kernels.pages import GPUPageTable, SequencePages
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import PAGE

from .kernels import KERNELS
from .simulator import to_mx, to_numpy

NUMPY = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: ml_dtypes.bfloat16}


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def angles_of(rng, n, d):
    """Complex turns [n, D/2], and the array that the kernels take."""
    angles = np.outer(rng.integers(0, 9000, n), 10000 ** (-np.arange(d // 2) / (d // 2)))
    return np.exp(1j * angles), np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def turned(x, turn, traditional):
    """x: [n, heads, D] by the definition, in float64."""
    n, heads, d = x.shape
    wide = x.astype(np.float64)
    pair = (
        wide.reshape(n, heads, d // 2, 2) if traditional else wide.reshape(n, heads, 2, d // 2).swapaxes(2, 3)
    )
    z = (pair[..., 0] + 1j * pair[..., 1]) * turn[:, None]
    both = np.stack([z.real, z.imag], axis=-1)
    return (both if traditional else both.swapaxes(2, 3)).reshape(x.shape)


@pytest.mark.pairwise
@pytest.mark.parametrize("tokens", [1, 3, 65])
@pytest.mark.parametrize("d,traditional,kind", KERNELS[append.APPEND])
def test_append_matches_its_twin(run, rng, d, traditional, kind, tokens):
    k, v = rng.normal(size=(2, tokens, 3, d)).astype(NUMPY[kind])
    turn, array = angles_of(rng, tokens, d)
    want = turned(k, turn, traditional).swapaxes(0, 1)
    for out in (
        append.append_gpu(to_mx(k), to_mx(v), mx.array(array), traditional, run),
        append.append_ops(to_mx(k), to_mx(v), mx.array(array), traditional),
    ):
        rows = np.array(out).view(np.float16)  # [n_kv, 2, T, D]
        np.testing.assert_allclose(rows[:, 0], want, atol=3e-3)
        np.testing.assert_array_equal(rows[:, 1], v.swapaxes(0, 1).astype(np.float16))


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", [[1], [65, 128, 70]], ids=["one", "several"])
@pytest.mark.parametrize("d,traditional,kind", KERNELS[rope_append.ROPE_APPEND])
def test_rope_append_matches_its_twin(run, rng, d, traditional, kind, lengths):
    """Turned queries, the same rotated, and an open page with a new row: those before it as they were, those
    behind it zeros whatever they held."""
    b, n_kv, heads = len(lengths), 2, 6
    views = [SequencePages([[], [], range(-(-n // PAGE))], n) for n in lengths]
    table = GPUPageTable(views, heads, n_kv, d)
    q = rng.normal(size=(b, heads, d)).astype(NUMPY[kind])
    k, v = rng.normal(size=(2, b, n_kv, d)).astype(NUMPY[kind])
    opened = rng.normal(size=(b, n_kv, 2, PAGE, d)).astype(np.float16)
    for i, n in enumerate(lengths):
        opened[i, :, :, (n - 1) % PAGE :] = np.nan
    turn, array = angles_of(rng, b, d)
    flat = [to_mx(x.reshape(b, -1)) for x in (q, k, v)]
    arguments = (*flat, mx.array(array), mx.array(opened.view(np.uint8)), table, bool(traditional))
    for out in (
        rope_append.rope_append_gpu(*arguments, run=run),
        rope_append.rope_append_ops(*arguments),
    ):
        np.testing.assert_allclose(out.q, turned(q, turn, traditional), atol=1e-4)
        np.testing.assert_allclose(out.q_rotated, rotate(mx.array(np.array(out.q))), atol=1e-5)
        got = np.array(out.open).view(np.float16).reshape(opened.shape)
        for i, n in enumerate(lengths):
            row = (n - 1) % PAGE
            np.testing.assert_allclose(got[i, :, 0, row], turned(k, turn, traditional)[i], atol=3e-3)
            np.testing.assert_array_equal(got[i, :, 1, row], v[i].astype(np.float16))
            np.testing.assert_array_equal(got[i, :, :, :row], opened[i, :, :, :row])
            assert not got[i, :, :, row + 1 :].any()


def test_order_of_threads_does_not_matter(run, rng):
    table = GPUPageTable([SequencePages([[], [], [0, 1]], 70)], 6, 2, 80)
    f = lambda n: mx.array(rng.normal(size=(1, n * 80)).astype(np.float32))  # noqa: E731
    q, k, v, turn = f(6), f(2), f(2), f(1)
    opened, results = mx.zeros((1, 2, 2, PAGE, 160), mx.uint8), set()
    for seed in range(20):
        seeded = lambda *a, seed=seed: run(*a, seed=seed)  # noqa: E731
        out = rope_append.rope_append_gpu(q, k, v, turn, opened, table, run=seeded)
        results.add(b"".join(np.array(x).tobytes() for x in out))
    assert len(results) == 1


@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_no_thread_of_rope_append_goes_to_memory_often(simulated, rng, d):
    """A page has 16 D words of 16 bytes for 256 threads: one thread for all of them would wait 16 D times."""
    kernel = simulated(rope_append.ROPE_APPEND)
    kernel.accesses, table = 0, GPUPageTable([SequencePages([[], [], [0]], PAGE)], 6, 2, d)
    heads = [mx.array(rng.normal(size=(1, n * d)).astype(np.float32)) for n in (6, 2, 2, 1)]
    opened = mx.zeros((1, 2, 2, PAGE, 2 * d), mx.uint8)

    def in_simulator(kernel, inputs, shapes, groups, chosen):
        return simulated(kernel)([to_numpy(x) for x in inputs], shapes, groups, chosen)

    rope_append.rope_append_gpu(*heads, opened, table, run=in_simulator)
    words = 16 * d // 256
    assert 2 * words - 1 <= kernel.accesses <= 2 * words + 24
