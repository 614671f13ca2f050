"""Every family and every way to stretch rope: native, MLX and NumPy say what mlx-lm's own model says."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.models.config.families import FAMILIES
from ruvmlx.models.config.rope import rope
from ruvmlx.models.config.rope_scaling import DynamicRope, LinearRope, LongRope, YarnRope
from ruvmlx.models.load import load_model
from tests.models.make_gguf import make_gguf_model
from tests.models.make_models import make_safetensors_model
from tests.models.vocabularies import TOKENS as VOCABULARY
from tests.oracles import mpt
from tests.oracles.mlx_lm import mlx_lm_logits, mlx_lm_model

from .exact_prompts import ExactPrompts
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
    "stablelm": SIZES | {"family": "stablelm", "head_dim": 16, "n_heads": 4, "rope_dims": 4},
    "stablelm-biased": SIZES
    | {"family": "stablelm", "head_dim": 16, "n_heads": 4, "rope_dims": 10, "attention_bias": True},
    "llama-linear": SIZES | {"rope": LinearRope(3.0)},
    "llama-dynamic": SIZES | {"rope": DynamicRope(3.0)},
    "llama-longrope": SIZES | {"rope": LONG},
    "llama-mlp-biased": SIZES | {"mlp_bias": True},
}
MPT = SIZES | {"family": "mpt", "tie": True}
MPTS = {  # mlx-lm has no such model
    "mpt": MPT | {"head_dim": 8, "n_heads": 8, "n_kv_heads": 8},
    "mpt-grouped": MPT | {"hidden_size": 96, "n_heads": 6, "n_kv_heads": 2},
    "mpt-multiquery": MPT | {"hidden_size": 96, "head_dim": 32, "n_heads": 3, "n_kv_heads": 1},
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
    assert worst(walk(ExactPrompts(model, chunk=37), TOKENS), judge) < NATIVE_TOLERANCE[stored]


@pytest.mark.parametrize("shape", ["qwen2", "qwen3-yarn", "smollm3", "mistral3-of-ministral3"])
def test_as_on_a_gpu(tmp_path, monkeypatch, shape):
    """What a GPU runs, here on the CPU's stream: 16-bit arithmetic, 4-bit weights as stored."""
    path, model = made(tmp_path, shape, "4-bit")
    as_on_metal = functools.partial(mlx.plan, device="metal")
    monkeypatch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
    judge = mlx_lm_logits(mlx_lm_model(path, float32=False), TOKENS, (50, 61, 13))
    backend = MLXBackend(model, device="cpu", chunk=37)
    assert worst(walk(backend, TOKENS), judge) < STORED_TOLERANCE["4-bit"]


@pytest.mark.parametrize("shape", MPTS)
def test_mpt_is_that_of_transformers(tmp_path, shape):
    """mlx-lm has no MPT, so the judge is NumPy code of its own, from the tensors of the file."""
    path = make_safetensors_model(tmp_path / "m", dtype="float32", **MPTS[shape])
    model, judge = load_model(str(path)), mpt.logits(path, TOKENS)
    assert np.abs(judge).max() > 1.0
    assert worst(walk(ReferenceBackend(model, chunk=23), TOKENS), judge) < FLOAT32_TOLERANCE
    assert worst(walk(NativeBackend(model, chunk=37), TOKENS), judge) < NATIVE_TOLERANCE["float32"]
    for own in (True, False):
        backend = MLXBackend(model, device="cpu", chunk=37, own_layers=own)
        assert worst(walk(backend, TOKENS), judge) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("stored", ["float32", "4-bit"])
@pytest.mark.parametrize("shape", ["stablelm-biased", *MPTS])
def test_greedy_tokens_are_those_of_the_reference(tmp_path, shape, stored):
    """Native and MLX, with its CPU layers and with the graph that a GPU runs; near them in every tier: 150
    tokens lie in cold, warm and hot pages."""
    path = make_safetensors_model(tmp_path / "m", **(SHAPES | MPTS)[shape], **STORED[stored])
    model = load_model(str(path))
    graphs = [MLXBackend(model, device="cpu", own_layers=own) for own in (True, False)]
    reference, others = ReferenceBackend(model), [NativeBackend(model), *graphs]
    backends = [reference, *others, *others]
    caches = [backend.new_cache() for backend in (reference, *others)]
    caches += [backend.new_cache(TierPolicy("tiered", (64, 64))) for backend in others]
    steps = [b.prefill(TOKENS[:150], c) for b, c in zip(backends, caches, strict=True)]
    for _ in range(20):
        want, plain, tiered = steps[0].logits, steps[1:4], steps[4:]
        token = int(want.argmax())
        assert [int(step.logits.argmax()) for step in plain] == [token] * 3
        assert all(np.abs(step.logits - want).max() < 0.2 * np.abs(want).max() for step in tiered)
        steps = [b.decode(token, c) for b, c in zip(backends, caches, strict=True)]
    assert [cache.stats().policy for cache in caches[4:]] == ["tiered"] * 3


@pytest.mark.parametrize("shape", ["stablelm-biased", "mpt-grouped"])
def test_rows_of_a_batch_are_those_of_each_alone(tmp_path, shape):
    """Sequences of unequal lengths, over pages of every tier."""
    path = make_safetensors_model(tmp_path / "m", **(SHAPES | MPTS)[shape], **STORED["8-bit"])
    model = load_model(str(path))
    native, lengths = NativeBackend(model), (3, 64, 65, 180)
    for policy in (None, TierPolicy("tiered", (64, 64))):
        alone, together = ([native.new_cache(policy) for _ in lengths] for _ in range(2))
        for n, *pair in zip(lengths, alone, together, strict=True):
            for cache in pair:
                native.prefill(TOKENS[:n], cache)
        steps = native.decode_batch(TOKENS[:4], together)
        for token, cache, step in zip(TOKENS, alone, steps, strict=False):
            np.testing.assert_array_equal(step.logits, native.decode(token, cache).logits)


def test_every_family_is_compared():
    """A new row needs a shape above, or one in test_agreement.py."""
    compared = {str(shape.get("family", "llama")) for shape in (SHAPES | MPTS).values()}
    assert compared == {family.model_type for family in FAMILIES}


IN_GGUF = [
    "qwen2-yarn",
    "qwen3",
    "smollm3",
    "ministral3",
    "stablelm",
    "stablelm-biased",
    "mistral3-of-mistral",
    "llama-linear",
    "llama-longrope",
    "mpt",
    "mpt-grouped",
]


@pytest.mark.parametrize("shape", IN_GGUF)
def test_gguf_holds_the_same_model(tmp_path, shape):
    """Keys and tensors of llama.cpp's names say the same configuration and the same weights."""
    kept = {key: value for key, value in (SHAPES | MPTS)[shape].items() if key != "wrapped"}
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
# mlx-lm never takes the short ones
LLAMA_CPPS = SHAPES | MPTS | {"llama-longrope-short": SIZES | {"rope": SHORT}}


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
