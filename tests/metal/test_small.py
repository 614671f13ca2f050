"""The two-tier LoRA and the MicroLoRA update: kernel, twin and float64."""

import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels import lora, micro
from ruvmlx.kernels.micro import NotFinite
from ruvmlx.platform.mx import mx

from .kernels import RANKS


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.mark.parametrize("r1,r2", RANKS)
@pytest.mark.parametrize("tokens,n_in,n_out", [(1, 9, 8), (3, 300, 257), (2, 65, 770)])
def test_lora(run, rng, tokens, n_in, n_out, r1, r2):
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    x, y, a1, b1, a2, b2 = (
        f(tokens, n_in),
        f(tokens, n_out),
        f(n_in, r1),
        f(r1, n_out),
        f(n_in, r2),
        f(r2, n_out),
    )
    a2, b2 = np.resize(a2, (max(n_in, 8), r2))[:n_in], b2
    if min(a1.size, a2.size, b1.size, b2.size, x.size) < 8:
        pytest.fail("MLX treats arrays under 8 elements differently: choose larger sizes")
    want = y + 0.7 * (x.astype(float) @ a1 @ b1) - 1.3 * (x.astype(float) @ a2 @ b2)
    base, fine = lora.Tier(a1, b1, 0.7), lora.Tier(a2, b2, -1.3)
    atol = 2e-5 * np.abs(want).max()
    np.testing.assert_allclose(lora.lora_add_gpu(x, y, base, fine, run), want, atol=atol)
    base, fine = (lora.Tier(mx.array(t.a), mx.array(t.b), t.scale) for t in (base, fine))
    np.testing.assert_allclose(lora.lora_add(mx.array(x), mx.array(y), base, fine), want, atol=atol)


@pytest.mark.parametrize("n", [8, 255, 1024, 1025, 5000])
def test_micro_update(run, rng, n):
    w, v, g = rng.normal(size=(3, n)).astype(np.float32)
    want_v = 0.9 * v.astype(float) + 0.3 * g
    for update, array in (
        (lambda *a: micro.micro_update_gpu(*a, run), np.array),
        (micro.micro_update_ops, mx.array),
    ):
        w_new, v_new, bad = update(array(w), array(v), array(g), 0.3, 0.9)
        np.testing.assert_allclose(v_new, want_v, atol=1e-6)
        np.testing.assert_allclose(w_new, w + want_v, atol=1e-6)
        assert np.array(bad).sum() == 0


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_micro_update_counts_what_is_not_finite(run, rng, poison):
    w, v, g = rng.normal(size=(3, 2050)).astype(np.float32)
    w[2049], g[2049], g[0], g[1500] = 3e38, abs(poison), poison, poison
    if np.isfinite(poison):
        g[0] = g[1500] = 1  # only the sum overflows
    with np.errstate(over="ignore"):
        want = np.sum(~np.isfinite(w + 1.0 * g))
    assert np.sum(micro.micro_update_gpu(w, v * 0, g, 1.0, 0.5, run)[2]) == want > 0
    good, bad = (mx.array(w * 0), mx.array(v), mx.array(v)), (mx.array(w), mx.array(v * 0), mx.array(g))
    assert len(micro.micro_step([good], 1.0, 0.5)) == 1
    with pytest.raises(NotFinite):
        micro.micro_step([good, bad], 1.0, 0.5)


def test_order_of_threads_does_not_matter(run, rng):
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    x, y = f(2, 300), f(2, 257)
    base, fine = lora.Tier(f(300, 8), f(8, 257), 1.0), lora.Tier(f(300, 2), f(2, 257), 1.0)
    results = set()
    for seed in range(20):
        seeded = lambda *a, seed=seed: run(*a, seed=seed)  # noqa: E731
        results.add(lora.lora_add_gpu(x, y, base, fine, seeded).tobytes())
        results.add(micro.micro_update_gpu(x, x, x, 0.1, 0.2, seeded)[0].tobytes())
    assert len(results) == 2
