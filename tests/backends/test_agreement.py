"""Three implementations of the same small models say the same: ours on MLX, mlx-lm itself, NumPy."""

import functools

import numpy as np
import pytest

from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.models.load import load_model
from ruvmlx.platform import cpu
from ruvmlx.platform.mx import nn
from tests.models.make_models import make_safetensors_model
from tests.oracles.mlx_lm import mlx_lm_logits, mlx_lm_model

# 3 layers, 6 heads over 2 (groups of 3), head_dim 16: attention is 96 wide in a model of 64.
SIZES = {
    "hidden_size": 64,
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
}
SHAPES = {
    "mistral-window-64": SIZES | {"sliding_window": 64},
    "llama3-scaled": SIZES | {"llama3": True, "rope_theta": 500000.0},
    "llama-tied-biased": SIZES | {"tie": True, "attention_bias": True, "mlp_bias": True},
}
STORED = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "4-bit": {"dtype": "float16", "bits": 4, "group_size": 32},
    "8-bit": {"dtype": "float16", "bits": 8, "group_size": 32},
}
# Largest difference of any logit, as a share of the largest logit. First: all compute in float32, the weights
# read from the file as stored. Second: mlx-lm computes in the file's own 16 bits, ours in float32.
FLOAT32_TOLERANCE = 2e-5
STORED_TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2, "4-bit": 1e-2, "8-bit": 1e-2}
TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 320, 180)]


@pytest.fixture(params=[(a, b) for a in SHAPES for b in STORED], ids=lambda p: "-".join(p))
def folder(request, tmp_path):
    shape, stored = request.param
    return make_safetensors_model(tmp_path / "m", **SHAPES[shape], **STORED[stored]), stored


def walk(backend, tokens):
    """Logits after every token [T, V]: odd chunks, decode, verify, a trim of 5 and the same tokens again."""
    cache, rows = backend.new_cache(), {}

    def verify(a, b):
        for i, row in enumerate(backend.verify(tokens[a:b], cache)):
            rows[a + i] = row

    def decode(a, b):
        for i in range(a, b):
            rows[i] = backend.decode(tokens[i], cache).logits

    verify(0, 41)
    rows[110] = backend.prefill(tokens[41:111], cache).logits
    decode(111, 125)
    assert cache.trim(5)
    assert cache.offset == 120
    decode(120, 131)
    verify(131, 150)
    assert cache.trim(12)
    verify(138, 152)
    decode(152, len(tokens))
    assert cache.offset == len(tokens)
    return rows


def worst(rows, logits):
    """Largest difference over the largest logit."""
    return max(np.abs(row - logits[i]).max() for i, row in rows.items()) / np.abs(logits).max()


def test_three_implementations_agree(folder):
    """Chunked prefill, decode beyond the window, verify and trim-and-continue, at 110 positions and more."""
    path, stored = folder
    model = load_model(str(path))
    ours = walk(MLXBackend(model, device="cpu", chunk=37), TOKENS)
    numpy = walk(ReferenceBackend(model, chunk=23), TOKENS)
    judge = mlx_lm_logits(mlx_lm_model(path), TOKENS, (50, 61, 13))
    assert len(ours) > 110
    assert np.abs(judge).max() > 1.0
    assert worst(ours, judge) < FLOAT32_TOLERANCE
    assert worst(numpy, judge) < FLOAT32_TOLERANCE
    as_stored = mlx_lm_logits(mlx_lm_model(path, float32=False), TOKENS, (180,))
    assert worst(ours, as_stored) < STORED_TOLERANCE[stored]


@pytest.mark.parametrize("stored", ["4-bit", "8-bit"])
@pytest.mark.parametrize("shape", ["mistral-window-64", "llama3-scaled"])
def test_packed_on_a_cpu(tmp_path, monkeypatch, shape, stored):
    """What a CPU runs when float32 would not fit: packed weights, float32 scales."""
    path = make_safetensors_model(tmp_path / "m", **SHAPES[shape], **STORED[stored])
    judge = mlx_lm_logits(mlx_lm_model(path), TOKENS, (50, 61, 13))
    monkeypatch.setattr(cpu, "total_memory", lambda: 1)
    packed = MLXBackend(load_model(str(path)), device="cpu", chunk=37)
    assert worst(walk(packed, TOKENS), judge) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", ["mistral-window-64", "llama3-scaled"])
def test_as_on_a_gpu(tmp_path, monkeypatch, shape, stored, bits):
    """What a GPU runs, here on the CPU's stream: mlx-lm's modules, weights and arithmetic as stored."""
    path = make_safetensors_model(tmp_path / "m", **SHAPES[shape], **STORED[stored], bits=bits, group_size=32)
    as_on_metal = functools.partial(mlx.plan, device="metal")
    monkeypatch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
    backend = MLXBackend(load_model(str(path)), device="cpu", chunk=37)
    judge = mlx_lm_logits(mlx_lm_model(path, float32=False), TOKENS, (50, 61, 13))
    assert worst(walk(backend, TOKENS), judge) < STORED_TOLERANCE[stored]
    flat = nn.utils.tree_flatten(backend._graph.parameters())
    types = {str(array.dtype).removeprefix("mlx.core.") for _, array in flat}
    assert types <= {stored, "uint32"}


def test_the_window_matters(tmp_path):
    """The same weights without a window answer differently beyond it, and the same within it."""
    with_window = load_model(str(make_safetensors_model(tmp_path / "a", **SIZES, sliding_window=64)))
    without = load_model(str(make_safetensors_model(tmp_path / "b", **SIZES)))
    a, b = MLXBackend(with_window, device="cpu"), MLXBackend(without, device="cpu")
    one, other = a.verify(TOKENS, a.new_cache()), b.verify(TOKENS, b.new_cache())
    assert np.abs(one[:64] - other[:64]).max() < 1e-4
    assert np.abs(one[64:] - other[64:]).max() > 0.1
