"""Small random models of every family, made on the spot, in every format that the loaders read.

    folder = make_safetensors_model(tmp_path / "m", bits=4, sliding_window=64)
    file = make_gguf_model(tmp_path / "m.gguf", quant="Q8_0", llama3=True)

Both take the fields of `Shape` as keywords. The same shape and seed give the same float32 weights
(`random_weights`), so that formats can be compared with each other.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.models.config.families import ATTENTION, MLP, QKV, family_of
from ruvmlx.models.config.layout import matrices, vectors
from ruvmlx.models.config.model import ModelConfig, QueryScale
from ruvmlx.models.config.rope import llama3_divisors
from ruvmlx.models.config.rope_scaling import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeScaling,
    YarnRope,
)
from ruvmlx.models.text.byte_level import byte_chars

from .gguf_writer import encode_blocks, f32, u32, write_gguf

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("a", "n"), ("an", "d"), ("Ġ", "Ġ"), ("o", "n")]
TOKENS = SPECIALS + list(byte_chars()) + ["".join(pair) for pair in MERGES]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
BETA = 0.3  # of queries' scale by position
BIAS_MAX = 8.0  # of ALiBi


@dataclass(frozen=True)
class Shape:
    """A tiny decoder with grouped heads and unequal sizes, so that no axis can be swapped unseen."""

    seed: int = 0
    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 192
    vocab_size: int = 320
    max_context: int = 512
    rope_theta: float = 10000.0
    tie: bool = False
    sliding_window: int | None = None  # makes it a Mistral
    llama3: bool = False  # LLAMA3 rope scaling
    rope: RopeScaling | None = None  # another one
    attention_bias: bool = False
    mlp_bias: bool = False
    family: str = ""  # a model_type; "": Llama, or Mistral with a window
    span: int = 50  # the context before stretching of a Ministral 3: its queries are scaled beyond
    wrapped: bool = False  # as the language model of a mistral3, beside one for images
    rope_dims: int | None = None  # of a StableLM: turned numbers of each head

    @property
    def model_type(self) -> str:
        return self.family or ("mistral" if self.sliding_window else "llama")

    @property
    def scaling(self) -> RopeScaling | None:
        return LLAMA3 if self.llama3 else self.rope

    def config(self) -> ModelConfig:
        family = family_of(self.model_type, "make_models")
        every_fourth = frozenset(range(3, self.n_layers, 4))
        flags = {"attention_bias": QKV if self.family == "stablelm" else ATTENTION, "mlp_bias": MLP}
        biases = [modules for flag, modules in flags.items() if getattr(self, flag)]
        return ModelConfig(
            model_type=self.model_type,
            hidden_size=self.hidden_size,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            rms_norm_eps=1e-5,
            rope_theta=self.rope_theta,
            max_context=self.max_context,
            tie_word_embeddings=self.tie,
            rope_scaling=self.scaling,
            sliding_window=self.sliding_window,
            biases=family.biases.union(*biases),
            head_norms=family.head_norms,
            layers_without_rope=every_fourth if family.skips_rope else frozenset(),
            query_scale=QueryScale(BETA, self.span) if family.scales_queries else None,
            layer_norm=family.layer_norm,
            norm_biases=family.norm_biases,
            rope_dims=self.rope_dims if family.has_rope else 0,
            alibi_bias_max=0.0 if family.has_rope else BIAS_MAX,
            gated_mlp=family.gated_mlp,
        )


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by mlx-lm's names: matrices ~ N(0, 1/in), norms near 1, biases near 0."""
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for module, (rows, cols) in matrices(config):
        scale = 1.0 if module == "model.embed_tokens" else cols**-0.5
        out[f"{module}.weight"] = (rng.standard_normal((rows, cols)) * scale).astype(np.float32)
    for name, shape in vectors(config):
        middle = 0.0 if name.endswith(".bias") else 1.0
        out[name] = (middle + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    return out


# safetensors --------------------------------------------------------------------------------------


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
    tensors = _stored(weights, dtype, bits, group_size)
    config = hf_config(made, bits, group_size)
    if made.family == "mpt":
        config, tensors = _mpt_config(made, config), _mpt_tensors(tensors)
    if made.wrapped:
        config, tensors = _wrapped_config(config), _wrapped_tensors(tensors)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "temperature": 0.6, "top_p": 0.9})
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
    for name, array in _with_fused(tensors, ("q_proj", "k_proj", "v_proj"), "qkv_proj").items():
        for ours, theirs in _MPT_NAMES.items():
            name = name.replace(ours, theirs)
        out[name] = array
    return out


def _with_fused(arrays: dict[str, Any], parts: tuple[str, ...], fused: str) -> dict[str, Any]:
    """The rows of several matrices as one, in the order of `parts`."""
    first, *others = parts
    out = {name: array for name, array in arrays.items() if not any(f".{part}." in name for part in others)}
    for name in [name for name in out if f".{first}." in name]:
        rows = [arrays[name.replace(f".{first}.", f".{part}.")] for part in parts]
        out[name.replace(f".{first}.", f".{fused}.")] = np.concatenate(rows)
        del out[name]
    return out


def _wrapped_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    images = {"vision_tower.patch_conv.weight": np.ones((4, 3), np.float16)}
    images |= {"multi_modal_projector.linear_1.weight": np.ones((4, 4), np.float16)}
    return images | {f"language_model.{name}": array for name, array in tensors.items()}


def _stored(
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
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer.json of 3 special tokens, 256 bytes and a few merges, with a ChatML template."""
    added = [
        {
            "id": i,
            "content": text,
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for i, text in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "vocab": {t: i for i, t in enumerate(TOKENS)},
        "merges": [list(m) for m in MERGES],
    }
    body = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    body |= {"pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    _write_json(folder / "tokenizer.json", body)
    names = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[2], "chat_template": CHAT_TEMPLATE}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


# GGUF ---------------------------------------------------------------------------------------------


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


def gguf_vocab_keys() -> dict[str, Any]:
    """The vocabulary of `write_tokenizer`, as GGUF keys."""
    types = np.array([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)), np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": u32(0),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def vocab_only_keys(size: int) -> dict[str, Any]:
    """The least that llama.cpp wants of a file without tensors."""
    return {
        "general.architecture": "llama",
        "llama.block_count": u32(1),
        "llama.context_length": u32(64),
        "llama.embedding_length": u32(32),
        "llama.feed_forward_length": u32(32),
        "llama.attention.head_count": u32(1),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "llama.vocab_size": u32(size),
    }


def gguf_spm_keys(add_space_prefix: bool = True) -> dict[str, Any]:
    """A tiny SentencePiece vocabulary: 3 control pieces, 256 bytes, letters, a few merged pieces."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    merged = ["\u2581t", "he", "\u2581the", "in", "an", "and", "\u2581\u2581", "on", "er", "th", "\u2581a"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *merged, *letters]
    types = np.array([2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters)), np.int32)
    scores = np.array([0.0] * 259 + [-float(i) for i in range(len(merged) + len(letters))], np.float32)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def gguf_tensors(made: Shape, quant: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (type, shape, bytes), q and k rows interleaved as llama.cpp's converter does."""
    from ruvmlx.models.config.gguf_config import gguf_name

    config = made.config()
    out = {}
    weights = random_weights(config, made.seed)
    if made.family == "mpt":
        weights = _with_fused(weights, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    for name, w in weights.items():
        kind = quant if w.ndim == 2 else "F32"
        if ".qkv_proj." in name:
            layer = name.split(".")[2]
            out[f"blk.{layer}.attn_qkv.weight"] = (kind, w.shape, encode_blocks(w, kind))
            continue
        out[gguf_name(name)] = (kind, w.shape, encode_blocks(_interleaved(w, name, config), kind))
    if made.llama3:
        divisors = llama3_divisors(LLAMA3, made.head_dim, made.rope_theta).astype("<f4")
        out["rope_freqs.weight"] = ("F32", divisors.shape, divisors.tobytes())
    if isinstance(made.rope, LongRope):
        for name, factors in (("short", made.rope.short_factor), ("long", made.rope.long_factor)):
            numbers = np.array(factors, "<f4")
            out[f"rope_factors_{name}.weight"] = ("F32", numbers.shape, numbers.tobytes())
    return out


def _interleaved(w: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
    """llama.cpp's permute(): half-split rows of each head -> interleaved, in the families that have it."""
    if not family_of(config.model_type, "make_models").interleaved:
        return w
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(name.split(".")[-2])
    if not heads:
        return w
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
