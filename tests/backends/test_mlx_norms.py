"""The LayerNorms of MLX's graph are MLX's own fused kernel, and match the twin of the C kernel."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.mlx import graph
from ruvmlx.kernels import layers
from ruvmlx.platform.mx import mx
from tests.metal.conftest import GPU
from tests.models.shapes import Shape

DEVICES = [mx.cpu, pytest.param(mx.gpu, marks=pytest.mark.skipif(not GPU, reason="no Metal or CUDA"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "tolerance"), [(mx.float32, 2e-5), (mx.float16, 4e-3)])
@pytest.mark.parametrize("width", [1, 17, 576, 1023])
@pytest.mark.parametrize("family", ["stablelm", "mpt"])
def test_layer_norm_matches_its_twin(family, width, kind, tolerance, device, monkeypatch):
    """With a bias (StableLM) and without (MPT), rows away from zero that make eps count; one launch."""
    config = replace(Shape(family=family).config(), hidden_size=width)
    norm, rng, launches = graph._layer_norm(config), np.random.default_rng(width), []
    fused = mx.fast.layer_norm
    monkeypatch.setattr(mx.fast, "layer_norm", lambda *a: launches.append(1) or fused(*a))
    with mx.stream(device):
        x = mx.array((0.1 + 0.01 * rng.normal(size=(5, width))).astype(np.float32)).astype(kind)
        values = {name: mx.array(rng.normal(size=width)).astype(kind) for name in norm.parameters()}
        norm.update(values)
        got = np.array(norm(x).astype(mx.float32))
    weight, bias = (
        np.array(values[n].astype(mx.float32)) if n in values else None for n in ("weight", "bias")
    )
    assert weight is not None and (bias is not None) == (family == "stablelm") and launches == [1]
    want = layers.layer_norm_ref(np.array(x.astype(mx.float32)), weight, bias, config.rms_norm_eps)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
