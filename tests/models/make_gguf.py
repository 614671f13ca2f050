"""Make small random models of every family as GGUF files.

    file = make_gguf_model(tmp_path / "m.gguf", quant="Q8_0", llama3=True)

The function takes the fields of `Shape` (shapes.py) as keywords.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.models.config.families import family_of
from ruvmlx.models.config.model import ModelConfig
from ruvmlx.models.config.rope import llama3_divisors
from ruvmlx.models.config.rope_scaling import LinearRope, LongRope, RopeScaling, YarnRope

from .gguf_writer import encode_blocks, f32, u32, write_gguf
from .shapes import BETA, BIAS_MAX, LLAMA3, Shape, random_weights, with_fused
from .vocabularies import gguf_vocab_keys


def make_gguf_model(path: Path, *, quant: str = "Q4_0", **shape: Any) -> Path:
    """A GGUF file. quant: a type of gguf_types.py; norms and biases are F32, as usual."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Shape(**shape)
    return write_gguf(path, gguf_metadata(made), gguf_tensors(made, quant))


def gguf_metadata(made: Shape) -> dict[str, Any]:
    arch = {"ministral3": "mistral3", "mistral": "mistral3"}.get(made.family, made.family or "llama")
    out: dict[str, Any] = {
        "block_count": u32(made.n_layers),
        "context_length": u32(made.max_context),
        "embedding_length": u32(made.hidden_size),
        "feed_forward_length": u32(made.intermediate_size),
        "attention.head_count": u32(made.n_heads),
        "attention.head_count_kv": u32(made.n_kv_heads),
        "attention.key_length": u32(made.head_dim),
        "attention.value_length": u32(made.head_dim),
        "rope.dimension_count": u32(made.config().turned_dims),
        "rope.freq_base": f32(made.rope_theta),
        f"attention.layer_norm_{'' if made.config().layer_norm else 'rms_'}epsilon": f32(1e-5),
    }
    if made.sliding_window:
        out["attention.sliding_window"] = u32(made.sliding_window)
    if made.config().query_scale is not None:
        out["attention.temperature_scale"] = f32(BETA)
        out["rope.scaling.original_context_length"] = u32(made.span)
    if made.family == "mpt":
        out = {key: value for key, value in out.items() if not key.startswith("rope.")}
        out["attention.max_alibi_bias"] = f32(BIAS_MAX)
    out |= _gguf_scaling(made.rope)
    named = {f"{arch}.{key}": value for key, value in out.items()}
    return {"general.architecture": arch, "general.name": "tiny"} | named | gguf_vocab_keys()


def _gguf_scaling(rope: RopeScaling | None) -> dict[str, Any]:
    if isinstance(rope, LinearRope):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": f32(rope.factor)}
    if isinstance(rope, LongRope):
        original = u32(rope.original_max_position)
        out = {"type": "longrope", "original_context_length": original}
        out["attn_factor"] = f32(rope.attention_factor)
        return {f"rope.scaling.{key}": value for key, value in out.items()}
    if not isinstance(rope, YarnRope):
        return {}
    out = {"type": "yarn", "factor": f32(rope.factor), "yarn_beta_fast": f32(rope.beta_fast)}
    out |= {"yarn_beta_slow": f32(rope.beta_slow), "original_context_length": u32(rope.original_max_position)}
    out |= {"yarn_log_multiplier": f32(1.0)} if rope.attention_factor == 1 else {}
    return {f"rope.scaling.{key}": value for key, value in out.items()}


def gguf_tensors(made: Shape, quant: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (type, shape, bytes), q and k rows interleaved as llama.cpp's converter does."""
    from ruvmlx.models.config.gguf_config import gguf_name

    config = made.config()
    out = {}
    weights = random_weights(config, made.seed)
    if made.family == "mpt":
        weights = with_fused(weights, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    for name, w in weights.items():
        kind = quant if w.ndim == 2 else "F32"
        if ".qkv_proj." in name:
            layer = name.split(".")[2]
            out[f"blk.{layer}.attn_qkv.weight"] = (kind, w.shape, encode_blocks(w, kind))
            continue
        out[gguf_name(name)] = (kind, w.shape, encode_blocks(_interleave(w, name, config), kind))
    if made.llama3:
        divisors = llama3_divisors(LLAMA3, made.head_dim, made.rope_theta).astype("<f4")
        out["rope_freqs.weight"] = ("F32", divisors.shape, divisors.tobytes())
    if isinstance(made.rope, LongRope):
        for name, factors in (("short", made.rope.short_factor), ("long", made.rope.long_factor)):
            numbers = np.array(factors, "<f4")
            out[f"rope_factors_{name}.weight"] = ("F32", numbers.shape, numbers.tobytes())
    return out


def _interleave(w: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
    """llama.cpp's permute(): half-split rows of each head -> interleaved, in the families that have it."""
    if not family_of(config.model_type, "make_models").interleaved:
        return w
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(name.split(".")[-2])
    if not heads:
        return w
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
