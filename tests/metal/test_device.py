"""What only a GPU can show: the dispatchers choose the kernels there, and MLX's own machinery takes them."""

import os

import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels import append, decode, demote, gather, rope_append, source
from ruvmlx.backends.mlx.kernels.rope_append import Turned
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import COLD, HOT, WARM

from . import make
from .conftest import GPU

needs_gpu = pytest.mark.skipif(
    not GPU, reason="no Metal or CUDA device: the kernels ran in the simulator only"
)


@pytest.fixture
def gpu():
    """Arrays and operations of the test are the GPU's."""
    mx.set_default_device(mx.gpu)
    assert source.on_gpu()


def test_there_is_a_metal_device():
    """CI on Apple Silicon sets RUVMLX_NEED_METAL: skipped kernels would pass for tested ones."""
    if not os.environ.get("RUVMLX_NEED_METAL"):
        pytest.skip("RUVMLX_NEED_METAL is not set")
    assert mx.metal.is_available()


def test_on_a_cpu_the_twins_run():
    assert mx.default_device() == mx.Device(mx.cpu)
    assert not source.on_gpu()


@needs_gpu
def test_heads_of_another_size(gpu):
    """The twins run on the GPU then. On CUDA, MLX multiplies float32 matrices in TF32, with 11 bits."""
    assert source.on_gpu(80) and not source.on_gpu(96)
    made, q, table = problem(96)
    new = Turned(q, demote.rotate(q), mx.array(make.opened(made)))
    got = decode.attend(new, [mx.array(p) for p in made.pools], table, mx.float32)
    want = make.attention(np.array(q[0]), np.array(demote.rotate(q)[0]), made, 0)
    np.testing.assert_allclose(got[0], want, atol=2e-2 if mx.cuda.is_available() else 1e-3)


def problem(d):
    rng = np.random.default_rng(6)
    made = make.cache(rng, d, 2, [(3, 2, 100, 0)])
    q = mx.array(rng.normal(size=(1, 8, d)).astype(np.float32))
    return made, q, decode.GPUPageTable(made.views, 8, 2, d)


@needs_gpu
@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_decode_and_prompt(gpu, d):
    """A cache in all tiers, f16 projections; through the functions that the backend calls."""
    rng, (made, q, table) = np.random.default_rng(5), problem(d)
    pools, opened = [mx.array(p) for p in made.pools], mx.array(make.opened(made))
    opened = opened.reshape(1, 2, 2, 64, 2 * d)
    f = lambda *shape: mx.array(rng.normal(size=shape).astype(np.float16))  # noqa: E731
    half, k, v, turn = q.reshape(1, -1).astype(mx.float16), f(1, 2 * d), f(1, 2 * d), mx.zeros((1, d)) + 0.7
    new = rope_append.rope_append(half, k, v, turn, opened, table)
    out = decode.attend(new, pools, table, mx.float16)
    with mx.stream(mx.cpu):
        twin = rope_append.rope_append_ops(half, k, v, turn, opened, table)
        want = decode.attend_ops(twin.q, twin.q_rotated, pools, twin.open, table)
        ours, theirs = (x.open.view(mx.float16) for x in (new, twin))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)  # an fma may turn the last bit
        np.testing.assert_allclose(out.astype(mx.float32), want, atol=0.02)

    fresh = append.append(f(9, 2, d), f(9, 2, d), mx.zeros((9, d)) + 0.7)
    chunk = gather.chunk(made.views[0], 9, 8, 2, d)
    got = gather.attend(f(1, 8, 9, d), pools, fresh, chunk)
    both = gather.gather_gpu(pools, fresh, chunk, 0)
    with mx.stream(mx.cpu):
        np.testing.assert_allclose(both, gather.gather_ops(pools, fresh, chunk, 0), rtol=1e-3, atol=2e-3)
    assert np.isfinite(np.array(got.astype(mx.float32))).all()


@needs_gpu
@pytest.mark.parametrize("d", [64, 80, 128])
def test_demotion_gives_the_twins_bytes(gpu, d):
    rng = np.random.default_rng(d)
    made = make.cache(rng, d, 3, [(0, 0, 640, 0)])
    # One page of the pool holds NaN, from which each device makes bytes of its own.
    pool, ids = mx.array(made.pools[HOT]), [made.views[0].by_tier[HOT][i] for i in (1, 5, 4, 0)]
    warm = demote.demote(pool, ids, d, WARM)
    cold = demote.demote(warm, [2, 0, 3, 1], d, COLD)
    with mx.stream(mx.cpu):
        twin = demote.demote_ops(pool[mx.array(ids)], d, WARM)
        np.testing.assert_array_equal(warm, twin)
        np.testing.assert_array_equal(cold, demote.demote_ops(twin[mx.array([2, 0, 3, 1])], d, COLD))
    assert cold.shape[-1] == source_bytes(COLD, d)


def source_bytes(tier: int, d: int) -> int:
    return {COLD: 64 * d + 512, WARM: 128 * d + 256, HOT: 256 * d}[tier]
