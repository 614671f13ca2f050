"""Every family and every way to stretch rope: native, MLX and NumPy say what mlx-lm's own model says."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.models.config.families import FAMILIES
from ruvmlx.models.config.rope import rope
from ruvmlx.models.config.rope_scaling import DynamicRope, LinearRope, LongRope, YarnRope
from ruvmlx.models.load import load_model
from tests.models.make_models import TOKENS as VOCABULARY
from tests.models.make_models import make_gguf_model, make_safetensors_model
from tests.oracles.mlx_lm import mlx_lm_logits, mlx_lm_model

from .test_agreement import FLOAT32_TOLERANCE, SIZES, STORED, STORED_TOLERANCE, TOKENS, walk, worst

# The context before stretching is 50, the text 180 tokens. The fourth of five layers is one without rope.
PLAIN_YARN = YarnRope(4.0, 50, 0.1 * float(np.log(4.0)) + 1, beta_fast=8.0)
EVEN_YARN = YarnRope(4.0, 50, 1.0, beta_fast=8.0)
LONG = LongRope(
    50, float(np.sqrt(1 + np.log(512 / 50) / np.log(50))), (1.0,) * 8, tuple(1 + 0.75 * i for i in range(8))
)
LAYERS = SIZES | {"n_layers": 5}
SHAPES = {
    "qwen2": SIZES | {"family": "qwen2", "head_dim": 16, "n_heads": 4, "tie": True},
    "qwen2-yarn": SIZES | {"family": "qwen2", "head_dim": 16, "n_heads": 4, "rope": PLAIN_YARN},
    "qwen3": SIZES | {"family": "qwen3", "tie": True},
    "qwen3-yarn": SIZES | {"family": "qwen3", "rope": PLAIN_YARN, "rope_theta": 1e6},
    "smollm3": LAYERS | {"family": "smollm3", "tie": True},
    "smollm3-yarn-biased": LAYERS | {"family": "smollm3", "rope": PLAIN_YARN, "attention_bias": True},
    "ministral3": SIZES | {"family": "ministral3", "rope": EVEN_YARN},
    "ministral3-window": SIZES | {"family": "ministral3", "rope": EVEN_YARN, "sliding_window": 70},
    "mistral3-of-ministral3": SIZES | {"family": "ministral3", "rope": EVEN_YARN, "wrapped": True},
    "mistral3-of-mistral": SIZES | {"family": "mistral", "wrapped": True},
    "llama-linear": SIZES | {"rope": LinearRope(3.0)},
    "llama-dynamic": SIZES | {"rope": DynamicRope(3.0)},
    "llama-longrope": SIZES | {"rope": LONG},
    "llama-mlp-biased": SIZES | {"mlp_bias": True},
}
NATIVE_TOLERANCE = {"float32": 2e-3, "4-bit": 5e-3}  # keys and values are float16


def made(tmp_path, shape: str, stored: str):
    path = make_safetensors_model(tmp_path / "m", **SHAPES[shape], **STORED[stored])
    return path, load_model(str(path))


@pytest.mark.parametrize("stored", ["float32", "4-bit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_backends_agree_with_mlx_lm(tmp_path, shape, stored):
    """Odd chunks, decode, verify and trims, past the window, the layers without rope and the old context."""
    path, model = made(tmp_path, shape, stored)
    judge = mlx_lm_logits(mlx_lm_model(path), TOKENS, (50, 61, 13))
    assert np.abs(judge).max() > 1.0
    assert worst(walk(ReferenceBackend(model, chunk=23), TOKENS), judge) < FLOAT32_TOLERANCE
    assert worst(walk(MLXBackend(model, device="cpu", chunk=37), TOKENS), judge) < FLOAT32_TOLERANCE
    assert worst(walk(NativeBackend(model, chunk=37), TOKENS), judge) < NATIVE_TOLERANCE[stored]


@pytest.mark.parametrize("shape", ["qwen2", "qwen3-yarn", "smollm3", "mistral3-of-ministral3"])
def test_as_on_a_gpu(tmp_path, monkeypatch, shape):
    """What a GPU runs, here on the CPU's stream: 16-bit arithmetic, 4-bit weights as stored."""
    path, model = made(tmp_path, shape, "4-bit")
    as_on_metal = functools.partial(mlx.plan, device="metal")
    monkeypatch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
    judge = mlx_lm_logits(mlx_lm_model(path, float32=False), TOKENS, (50, 61, 13))
    backend = MLXBackend(model, device="cpu", chunk=37)
    assert worst(walk(backend, TOKENS), judge) < STORED_TOLERANCE["4-bit"]


def test_every_family_is_compared():
    """A new row needs a shape above, or one in test_agreement.py."""
    compared = {str(shape.get("family", "llama")) for shape in SHAPES.values()}
    assert compared == {family.model_type for family in FAMILIES}


IN_GGUF = [
    "qwen2-yarn",
    "qwen3",
    "smollm3",
    "ministral3",
    "mistral3-of-mistral",
    "llama-linear",
    "llama-longrope",
]


@pytest.mark.parametrize("shape", IN_GGUF)
def test_gguf_holds_the_same_model(tmp_path, shape):
    """Keys and tensors of llama.cpp's names say the same configuration and the same weights."""
    kept = {key: value for key, value in SHAPES[shape].items() if key != "wrapped"}
    file = load_model(str(make_gguf_model(tmp_path / "m.gguf", quant="F32", **kept)))
    folder = load_model(str(make_safetensors_model(tmp_path / "f", dtype="float32", **kept)))
    plain = [replace(model.config, rope_scaling=None) for model in (file, folder)]
    assert plain[0] == plain[1]
    for one, other in zip(rope(file.config), rope(folder.config), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    one, other = ReferenceBackend(file), ReferenceBackend(folder)
    got, want = (b.verify(TOKENS[:90], b.new_cache()) for b in (one, other))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


SHORT = LongRope(512, 1.2, tuple(1 + 0.5 * i for i in range(8)), (1.0,) * 8)
LLAMA_CPPS = SHAPES | {"llama-longrope-short": SIZES | {"rope": SHORT}}  # mlx-lm never takes the short ones


@pytest.mark.parametrize("shape", [*IN_GGUF, "llama-longrope-short"])
def test_gguf_runs_as_llama_cpp_runs_it(tmp_path, shape):
    """llama.cpp keeps keys and values as float16. It reads yarn's betas for some architectures only."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not installed (uv sync --group oracle)")
    kept = {k: value for k, value in LLAMA_CPPS[shape].items() if k not in ("wrapped", "attention_bias")}
    if isinstance(kept.get("rope"), YarnRope) and shape != "ministral3":
        kept["rope"] = replace(kept["rope"], beta_fast=32.0)
    file = make_gguf_model(tmp_path / "m.gguf", quant="F32", **kept | {"vocab_size": len(VOCABULARY)})
    tokens = [token % len(VOCABULARY) for token in TOKENS]
    options = {"n_ctx": 256, "n_batch": 256, "n_threads": 1, "logits_all": True, "verbose": False}
    judge = llama_cpp.Llama(str(file), **options)
    judge.eval(tokens)
    want = np.array(judge.scores[: len(tokens)])
    backend = ReferenceBackend(load_model(str(file)))
    got = backend.verify(tokens, backend.new_cache())
    assert np.abs(got - want).max() / np.abs(want).max() < NATIVE_TOLERANCE["float32"]
