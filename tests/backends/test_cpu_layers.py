"""The CPU's own operations against MLX's."""

import numpy as np
import pytest

from ruvmlx.backends.mlx import cpu_layers
from ruvmlx.platform.mx import mx


def test_exp_is_accurate_over_its_whole_range():
    """Relative error under (3 + |x|) 1e-7 over the whole range; far below it, practically zero."""
    x = np.concatenate([np.linspace(-87, 88, 40001), np.linspace(-1, 1, 4001)]).astype(np.float32)
    with mx.stream(mx.cpu):
        got = np.array(cpu_layers.exp(mx.array(x)))
        tails = np.array(cpu_layers.exp(mx.array([-np.inf, -1000.0, -88.0, 0.0])))
    error = np.abs(got / np.exp(x.astype(np.float64)) - 1)
    assert (error < (3 + np.abs(x)) * 1e-7).all()
    assert (tails[:3] < 2e-38).all()
    assert tails[3] == pytest.approx(1, abs=2e-7)


@pytest.mark.parametrize(("n", "total"), [(1, 700), (33, 200), (70, 70)])
def test_attention_above_and_below_large(monkeypatch, n, total):
    """Our exp or MLX's softmax, whole or in blocks of 8 and more queries: all as MLX's own."""
    rng = np.random.default_rng(4)
    q, k, v = (
        mx.array(rng.standard_normal((1, h, t, 16)).astype(np.float32))
        for h, t in ((6, n), (2, total), (2, total))
    )
    mask = mx.tril(mx.ones((n, total)), total - n) > 0
    mask = mx.where(mask, 0.0, -np.inf).astype(mx.float32)
    with mx.stream(mx.cpu):
        judge = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal" if n > 1 else None)
        for large, tile in ((1, 1 << 30), (1 << 30, 1 << 30), (1, 10), (1 << 30, 8000)):
            monkeypatch.setattr(cpu_layers, "LARGE", large)
            monkeypatch.setattr(cpu_layers, "TILE", tile)
            grouped = q.reshape(1, 2, 3, n, 16), k[:, :, None], v[:, :, None]
            got = cpu_layers.attend(*grouped, mask if n > 1 else None).reshape(1, 6, n, 16)
            np.testing.assert_allclose(np.array(got), np.array(judge), atol=2e-5)
