"""Models of ours whose matrices are small floats, on every backend, beside mlx-lm's own model."""

import functools

import numpy as np
import pytest

from ruvmlx.backends.matrix_types import bytes_in_memory, matrix_types, mlx_bits, native_bits
from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.mlx import graph
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.native.weights import _plan
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.interchange import places
from ruvmlx.models.files.small_floats import TYPES
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx
from tests.models.make_models import make_safetensors_model
from tests.models.small_float_models import FP8, MODE_NAMES, SHAPE, make_small_floats, mlx_weights
from tests.oracles.mlx_lm import mlx_lm_logits, mlx_lm_model

from .exact_prompts import ExactPrompts
from .test_agreement import FLOAT32_TOLERANCE, STORED_TOLERANCE, TOKENS, walk, worst
from .test_families import EVEN_YARN

CHUNKS = (50, 61, 13)
NATIVE_TOLERANCE = dict.fromkeys([*MODE_NAMES, *FP8], 2e-2) | {"mxfp4": 5e-3}  # the others are rounded


def judged(tmp_path, folder, how, **shape):
    """mlx-lm's logits. Of fp8 mlx-lm multiplies the bytes themselves with the scales: it gets the weights."""
    if how in FP8:
        plain = make_safetensors_model(tmp_path / "plain", dtype="float32", **SHAPE | shape)
        model = mlx_lm_model(plain)
        prefix = "language_model." if shape.get("wrapped") else ""
        model.load_weights([(prefix + name, mx.array(w)) for name, w in mlx_weights(folder).items()])
    else:
        model = mlx_lm_model(folder)
    return mlx_lm_logits(model, TOKENS, CHUNKS)


@pytest.mark.parametrize("how", [*MODE_NAMES, *FP8])
def test_all_backends_agree_with_mlx_lm(tmp_path, how):
    folder = make_small_floats(tmp_path / "m", how)
    model, judge = load_model(str(folder)), judged(tmp_path, folder, how)
    assert model.is_own and np.abs(judge).max() > 1.0
    assert worst(walk(ReferenceBackend(model, chunk=23), TOKENS), judge) < FLOAT32_TOLERANCE
    assert worst(walk(MLXBackend(model, device="cpu", chunk=37), TOKENS), judge) < FLOAT32_TOLERANCE
    assert worst(walk(ExactPrompts(model, chunk=37), TOKENS), judge) < NATIVE_TOLERANCE[how]


@pytest.mark.parametrize("how", [*MODE_NAMES, *FP8])
def test_as_on_a_gpu(tmp_path, monkeypatch, how):
    """Here on the CPU's stream: 16-bit arithmetic, MLX's own formats as they are."""
    folder = make_small_floats(tmp_path / "m", how)
    model, judge = load_model(str(folder)), judged(tmp_path, folder, how)
    as_on_metal = functools.partial(mlx.plan, device="metal")
    monkeypatch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
    backend = MLXBackend(model, device="cpu", chunk=37)
    assert backend.compute_dtype() == mx.bfloat16
    assert worst(walk(backend, TOKENS), judge) < STORED_TOLERANCE["bfloat16"]
    formats = {m.mode for m in backend.lent_graph().leaf_modules()["model"]["layers"][0]["mlp"].values() if m}
    assert formats == {"affine" if how in FP8 else how}


@pytest.mark.parametrize("shape", ["ministral3", "wrapped"])
def test_fp8_as_ministral_3_has_it(tmp_path, shape):
    """The language model of a model for images; the table of formats is in its text_config, too."""
    sizes = {"family": "ministral3", "rope": EVEN_YARN, "wrapped": shape == "wrapped"}
    folder = make_small_floats(tmp_path / "m", "fp8", **sizes)
    model, judge = load_model(str(folder)), judged(tmp_path, folder, "fp8", **sizes)
    assert model.is_own and model.wrapped == (shape == "wrapped")
    assert worst(walk(ReferenceBackend(model), TOKENS), judge) < FLOAT32_TOLERANCE
    assert worst(walk(NativeBackend(model), TOKENS), judge) < NATIVE_TOLERANCE["fp8"]


def test_tiers_and_a_base_lora_work_with_mlxs_formats(tmp_path, monkeypatch):
    """What mlx-lm's own path lacked. As on a GPU."""
    model = load_model(str(make_small_floats(tmp_path / "m", "mxfp4")))
    as_on_metal = functools.partial(mlx.plan, device="metal")
    monkeypatch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
    backend, native = MLXBackend(model, device="cpu"), ExactPrompts(model)
    rng = np.random.default_rng(0)
    pairs = {
        place: (rng.normal(0, 0.1, (n_in, 2)).astype("f4"), rng.normal(0, 0.1, (2, n_out)).astype("f4"))
        for place, (n_in, n_out) in places(model.config).values()
    }
    for one in (backend, native):
        cache = one.new_cache(TierPolicy("tiered", (64, 128)))
        plain = one.prefill(TOKENS, cache).logits
        assert cache.stats().tokens[1] == 64
        one.set_lora(BaseLoRA(pairs))
        changed = one.prefill(TOKENS, one.new_cache()).logits
        assert np.abs(changed - plain).max() > 0.05 * np.abs(plain).max()
    reference = ReferenceBackend(model)
    reference.set_lora(BaseLoRA(pairs))
    want = reference.prefill(TOKENS, reference.new_cache()).logits
    assert np.abs(changed - want).max() < 5e-3 * np.abs(want).max()  # the last is native


LARGE = {"hidden_size": 512, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "n_layers": 1, "vocab_size": 512}


@pytest.mark.parametrize("how", [*MODE_NAMES, "fp8"])
def test_bits_are_those_that_a_matrix_takes(how, tmp_path):
    """The C library's bytes, and those of the graph as on a GPU; `show` prints these numbers."""
    model = load_model(str(make_small_floats(tmp_path / "m", how, **LARGE, intermediate_size=512)))
    weights, module, kind = model.load_weights(), "model.layers.0.mlp.up_proj", TYPES[how]
    packed = _plan(weights, module, (512, 512)).nbytes
    assert 8 * packed / 512**2 == pytest.approx(native_bits(kind), abs=0.01)
    how_held = mlx.plan(weights, "metal")
    net = graph.build(model.config, weights, how_held.dtype, False)
    taken = sum(p.nbytes for name, p in graph.parameters(net).items() if name.startswith(f"{module}."))
    assert 8 * taken / 512**2 == pytest.approx(mlx_bits(kind), abs=0.001)
    held = sum(p.nbytes for p in graph.parameters(net).values())
    assert bytes_in_memory(model.types, "mlx") == pytest.approx(held, rel=0.01)
    row = next(row for row in matrix_types(model) if row.type == how)
    assert row.rounded == {"mxfp4": (), "fp8": ("native", "mlx")}.get(how, ("native",))
