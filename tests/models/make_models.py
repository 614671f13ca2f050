"""Make small random models of every family as Hugging Face folders.

    folder = make_safetensors_model(tmp_path / "m", bits=4, sliding_window=64)

The function takes the fields of `Shape` (shapes.py) as keywords.
make_gguf.py makes the same models as GGUF files.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.models.config.families import family_of
from ruvmlx.models.config.rope_scaling import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeScaling,
    YarnRope,
)

from .shapes import BETA, BIAS_MAX, Shape, random_weights, with_fused
from .vocabularies import write_json, write_tokenizer


def make_safetensors_model(
    folder: Path,
    *,
    dtype: str = "float16",
    bits: int | None = None,
    group_size: int = 64,
    shards: int = 1,
    **shape: Any,
) -> Path:
    """A Hugging Face folder. dtype: float32, float16 or bfloat16; bits: None, 4 or 8 (MLX affine)."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Shape(**shape)
    weights = random_weights(made.config(), made.seed)
    tensors = _stored_tensors(weights, dtype, bits, group_size)
    config = hf_config(made, bits, group_size)
    if made.family == "mpt":
        config, tensors = _mpt_config(made, config), _mpt_tensors(tensors)
    if made.wrapped:
        config, tensors = _wrapped_config(config), _wrapped_tensors(tensors)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "temperature": 0.6, "top_p": 0.9})
    write_tokenizer(folder)
    _write_shards(folder, tensors, shards)
    return folder


def hf_config(made: Shape, bits: int | None = None, group_size: int = 64) -> dict[str, Any]:
    """What config.json says of a Shape."""
    config = made.config()
    out = {
        "model_type": config.model_type,
        "architectures": [f"{family_of(made.model_type, 'make_models').name}ForCausalLM"],
        "hidden_size": made.hidden_size,
        "num_hidden_layers": made.n_layers,
        "num_attention_heads": made.n_heads,
        "num_key_value_heads": made.n_kv_heads,
        "head_dim": made.head_dim,
        "intermediate_size": made.intermediate_size,
        "vocab_size": made.vocab_size,
        family_of(made.model_type, "make_models").eps: config.rms_norm_eps,
        "rope_theta": made.rope_theta,
        "max_position_embeddings": made.max_context,
        "tie_word_embeddings": made.tie,
        "attention_bias": made.attention_bias,
        "mlp_bias": made.mlp_bias,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }
    if made.sliding_window:  # mlx-lm keeps a window only where layer_types asks for it
        out |= {"sliding_window": made.sliding_window, "layer_types": ["sliding_attention"] * made.n_layers}
    if config.model_type == "stablelm":
        out |= {"use_qkv_bias": made.attention_bias, "use_parallel_residual": False, "qk_layernorm": False}
        out |= {"partial_rotary_factor": config.turned_dims / config.head_dim}
    out |= _hf_rope(made)
    if bits:
        out["quantization"] = {"group_size": group_size, "bits": bits}
    return out


def _hf_rope(made: Shape) -> dict[str, Any]:
    table = _hf_scaling(made.scaling)
    if made.config().query_scale is None:
        return {"rope_scaling": table} if table else {}
    own = {"rope_theta": made.rope_theta, "llama_4_scaling_beta": BETA}
    own["original_max_position_embeddings"] = made.span
    return {"rope_parameters": {"rope_type": "default"} | table | own}


def _hf_scaling(rope: RopeScaling | None) -> dict[str, Any]:
    original = {"original_max_position_embeddings": getattr(rope, "original_max_position", 0)}
    match rope:
        case LinearRope():
            return {"rope_type": "linear", "factor": rope.factor}
        case DynamicRope():
            return {"rope_type": "dynamic", "factor": rope.factor}
        case Llama3Rope():
            low, high = rope.low_freq_factor, rope.high_freq_factor
            table = {"rope_type": "llama3", "factor": rope.factor, "low_freq_factor": low}
            return table | original | {"high_freq_factor": high}
        case YarnRope():
            table = {"rope_type": "yarn", "factor": rope.factor, "beta_fast": rope.beta_fast}
            table |= original | {"beta_slow": rope.beta_slow}
            return table | ({"mscale": 1.0, "mscale_all_dim": 1.0} if rope.attention_factor == 1 else {})
        case LongRope():
            factors = {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
            return {"rope_type": "longrope"} | original | factors
    return {}


def _wrapped_config(text: dict[str, Any]) -> dict[str, Any]:
    """As mlx-community stores a model for images: what it was quantised by is outside."""
    outer = {key: text.pop(key) for key in ("quantization", "eos_token_id") if key in text}
    architectures = ["Mistral3ForConditionalGeneration"]
    vision = {"model_type": "pixtral", "hidden_size": 16}
    return {
        "model_type": "mistral3", "architectures": architectures, "text_config": text, "vision_config": vision
    } | outer  # fmt: skip


def _mpt_config(made: Shape, config: dict[str, Any]) -> dict[str, Any]:
    """As MosaicML writes it."""
    kinds = {made.n_heads: "multihead_attention", 1: "multiquery_attention"}
    attention = {"alibi": True, "alibi_bias_max": int(BIAS_MAX), "attn_impl": "torch", "clip_qkv": None}
    attention |= {"attn_type": kinds.get(made.n_kv_heads, "grouped_query_attention")}
    attention |= {"kv_n_heads": made.n_kv_heads, "qk_ln": False, "softmax_scale": None, "prefix_lm": False}
    kept = ("model_type", "architectures", "vocab_size", "eos_token_id", "quantization")
    return {key: config[key] for key in kept if key in config} | {
        "d_model": made.hidden_size,
        "n_heads": made.n_heads,
        "n_layers": made.n_layers,
        "expansion_ratio": made.intermediate_size / made.hidden_size,
        "max_seq_len": made.max_context,
        "attn_config": attention,
        "learned_pos_emb": True,
        "logit_scale": None,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
    }


_MPT_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.norm_f",
    "model.layers": "transformer.blocks",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.out_proj",
    "self_attn.qkv_proj": "attn.Wqkv",
    "mlp": "ffn",
}


def _mpt_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {}
    for name, array in with_fused(tensors, ("q_proj", "k_proj", "v_proj"), "qkv_proj").items():
        for ours, theirs in _MPT_NAMES.items():
            name = name.replace(ours, theirs)
        out[name] = array
    return out


def _wrapped_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    images = {"vision_tower.patch_conv.weight": np.ones((4, 3), np.float16)}
    images |= {"multi_modal_projector.linear_1.weight": np.ones((4, 4), np.float16)}
    return images | {f"language_model.{name}": array for name, array in tensors.items()}


def _stored_tensors(
    weights: dict[str, np.ndarray], dtype: str, bits: int | None, group_size: int
) -> dict[str, np.ndarray]:
    kind = _dtype(dtype)
    out: dict[str, np.ndarray] = {}
    for name, w in weights.items():
        if bits and w.ndim == 2:
            packed, scales, biases = quantize_affine(w, bits, group_size)
            module = name.removesuffix(".weight")
            out |= {
                name: packed,
                f"{module}.scales": scales.astype(kind),
                f"{module}.biases": biases.astype(kind),
            }
        else:
            out[name] = w.astype(kind)
    return out


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)


def quantize_affine(w: np.ndarray, bits: int, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 [out, in] -> MLX affine: uint32 [out, in * bits / 32], two float32 [out, in / group]."""
    rows = len(w)
    groups = w.reshape(rows, -1, group_size)
    low, high = groups.min(2), groups.max(2)
    scales = (high - low) / (2**bits - 1)
    q = np.rint((groups - low[..., None]) / scales[..., None]).astype(np.uint32).reshape(rows, -1, 32 // bits)
    packed = (q << (bits * np.arange(32 // bits, dtype=np.uint32))).sum(2, dtype=np.uint32)
    return packed, scales, low


_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, a in tensors.items():
        span = [at, at + a.nbytes]
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[a.dtype.name],
            "shape": list(a.shape),
            "data_offsets": span,
        }
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values())


def _write_shards(folder: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return
    names, where = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        (folder / file).write_bytes(safetensors_bytes({name: tensors[name] for name in part}))
        where |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
