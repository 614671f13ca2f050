"""This module converts the metadata keys of a GGUF file to a ModelConfig.

Most of the keys have the file's architecture as a prefix, such as "llama.". Several families can have the
same architecture (families.py).
"""

from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from ...errors import CorruptFile, UnsupportedModel
from ..files.error_text import value_in_words
from ..files.gguf import GGUFFile
from ..files.gguf_blocks import unpack
from .families import ATTENTION, MLP, Family, Window, families_of
from .hf_config import refuse_flags
from .hf_rope import yarn_scale
from .layout import check_config, check_layers, check_shapes, layers_without_rope
from .model import ModelConfig, QueryScale
from .rope import llama3_from_divisors
from .rope_scaling import LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope

_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FREQS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"


def gguf_name(name: str) -> str:
    """Return GGUF's name of the tensor with the mlx-lm name `name`: "model.layers.3.mlp.up_proj.weight"
    becomes "blk.3.ffn_up.weight"."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, module = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_MODULES[module]}.{kind}"
    return f"{_MODULES[module]}.{kind}"


def read_config(file: GGUFFile) -> ModelConfig:
    """Return a checked ModelConfig from the file's keys and its list of tensors."""
    architecture = file.metadata.get("general.architecture")
    families = families_of(architecture, file.path.name)
    keys = Keys(file, str(architecture))
    config = _base_config(file, keys, families)
    check_config(config, file.path.name)
    _check_widths(keys, config)
    scaling = _llama3_scaling(file, config)
    if scaling and config.rope_scaling:
        raise UnsupportedModel(
            f"{file.path.name}: {ROPE_FREQS} beside the rope scaling {config.rope_scaling}; "
            "one of the two is run."
        )
    return replace(config, rope_scaling=scaling or config.rope_scaling)


class Keys:
    """The metadata keys of an architecture, with methods that read one key each; all methods but `get` check
    the value's type. The methods add the prefix: the key "block_count" stands for "llama.block_count" if the
    architecture is "llama"."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self.where, self.prefix = file, file.path.name, f"{architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(self.prefix + key, default)

    def _bad(self, key: str, got: Any, expected: str) -> CorruptFile:
        name = f"key {self.prefix}{key}"
        return CorruptFile(f"{self.where}: {name} is {value_in_words(got)}; {expected} was expected.")

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._bad(key, value, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise self._bad(key, value, "a number")
        # the shortest decimal number: 1e-05, not 9.999999747e-06, the exact value of the float32 number
        return float(str(np.float32(value)))

    def uniform(self, key: str, default: int | None = None) -> int:
        """Return the integer value of the key. If the value is an array of equal integers (one for each
        layer), return this integer. Raises UnsupportedModel if the integers differ."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise UnsupportedModel(f"{self.where}: {self.prefix}{key} differs from layer to layer.")
            return int(value[0])
        return self.integer(key, default)


def _base_config(file: GGUFFile, keys: Keys, families: list[Family]) -> ModelConfig:
    n_heads, n_layers = keys.uniform("attention.head_count"), keys.integer("block_count")
    hidden = keys.integer("embedding_length")
    if n_heads < 1:
        raise CorruptFile(
            f"{keys.where}: {keys.prefix}attention.head_count is {n_heads}; at least 1 was expected."
        )
    check_layers(n_layers, keys.where)
    scale, window = _query_scale(keys), _window(keys, families)
    family = _family(families, scale, window)
    head_dim = keys.integer("attention.key_length", hidden // n_heads)
    _refuse_tensors(file, family)
    return ModelConfig(
        model_type=family.model_type,
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=keys.uniform("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        intermediate_size=keys.uniform("feed_forward_length"),
        vocab_size=_vocab_size(file),
        rms_norm_eps=keys.number(f"attention.layer_norm_{'' if family.layer_norm else 'rms_'}epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        max_context=keys.integer("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_scaling=_scaling(file, keys),
        sliding_window=window,
        biases=family.biases | _stored_biases(file),
        head_norms=family.head_norms,
        layers_without_rope=layers_without_rope(n_layers, NO_ROPE_INTERVAL)
        if family.skips_rope
        else frozenset(),
        query_scale=scale,
        layer_norm=family.layer_norm,
        norm_biases=family.norm_biases or (family.layer_norm and "blk.0.attn_norm.bias" in file.tensors),
        rope_dims=_rope_dims(keys, family, head_dim),
        alibi_bias_max=_alibi_bias_max(keys, family),
        gated_mlp=family.gated_mlp,
    )


NO_ROPE_INTERVAL = 4  # files have no key for this interval; as in llama.cpp, every fourth layer has no RoPE


def _family(families: list[Family], scale: QueryScale | None, window: int | None) -> Family:
    """Return the family of a file whose architecture several families have: the first family that scales
    queries if and only if `scale` is given, and that has a window in every layer if `window` is given. If no
    family fits, return the first family."""
    for family in families:
        if family.scales_queries == (scale is not None) and (
            window is None or family.window is Window.EVERY_LAYER
        ):
            return family
    return families[0]


def _window(keys: Keys, families: list[Family]) -> int | None:
    """Return the value of the key attention.sliding_window if one of the families has a window in every layer
    (Mistral, Ministral 3). Return None for other families and for a missing key, because llama.cpp runs the
    other families without a window."""
    if not any(family.window is Window.EVERY_LAYER for family in families):
        return None
    return keys.integer("attention.sliding_window", 0) or None


def _query_scale(keys: Keys) -> QueryScale | None:
    beta = keys.number("attention.temperature_scale", 0.0)
    return QueryScale(beta, _original(keys)) if beta else None


def _original(keys: Keys) -> int:
    return keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))


def _stored_biases(file: GGUFFile) -> frozenset[str]:
    """Return the modules (for example "q_proj") that have a bias in the first layer. A later check of all
    tensors raises an error if another layer has other biases."""
    names = {f"self_attn.{m}" for m in ATTENTION} | {f"mlp.{m}" for m in MLP}
    return frozenset(
        name.partition(".")[2] for name in names if f"blk.0.{_MODULES[name]}.bias" in file.tensors
    )


def _vocab_size(file: GGUFFile) -> int:
    """Return the number of rows of the embedding: one for each token of the vocabulary, and possibly unused
    rows after them."""
    if "token_embd.weight" not in file.tensors:
        raise CorruptFile(f"{file.path.name}: tensor 'token_embd.weight' is missing. Fetch the model again.")
    return file.tensors["token_embd.weight"].shape[0]


def rope_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the tensors that can hold divisors of RoPE's frequencies in a file with this
    configuration."""
    return (ROPE_SHORT, ROPE_LONG) if isinstance(config.rope_scaling, LongRope) else (ROPE_FREQS,)


def _scaling(file: GGUFFile, keys: Keys) -> RopeScaling | None:
    """Return RoPE's scaling as the file's keys describe it; None: no scaling, or Llama-3's, which
    `_llama3_scaling` reads. If the file has a factor and no scaling type, the type is linear."""
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0)
    if kind == "longrope":
        return _longrope(file, keys, factor)
    _refuse_factor(keys, "attn_factor", 1.0)
    if kind in ("none", "llama3") or (kind == "linear" and factor in (0, 1)):
        return None
    if kind == "linear":
        return LinearRope(factor)
    if kind == "yarn":
        return _yarn(keys, factor)
    raise UnsupportedModel(
        f"{keys.where}: rope scaling {kind[:40]!r}; none, linear, Llama-3, yarn and longrope are run."
    )


def _refuse_factor(keys: Keys, key: str, kept: float) -> None:
    if keys.number(f"rope.scaling.{key}", kept) != kept:
        raise UnsupportedModel(
            f"{keys.where}: {keys.prefix}rope.scaling.{key} is {keys.get(f'rope.scaling.{key}')}; "
            f"only {kept:g} is run."
        )


def _longrope(file: GGUFFile, keys: Keys, factor: float) -> LongRope:
    """Read the divisors of RoPE's frequencies from two tensors. llama.cpp uses the tensor ROPE_LONG if the
    context is longer than the original context. llama.cpp would also divide all frequencies by the value of
    the key "rope.scaling.factor", but converters write no such key, so the function accepts only a missing
    key and the values 0 and 1."""
    if factor not in (0, 1):
        raise UnsupportedModel(
            f"{keys.where}: {keys.prefix}rope.scaling.factor is {factor:g} beside longrope; only 1 is run."
        )
    short, long = (_divisors(file, name) for name in (ROPE_SHORT, ROPE_LONG))
    return LongRope(_original(keys), keys.number("rope.scaling.attn_factor", 1.0), short, long)


def _divisors(file: GGUFFile, name: str) -> tuple[float, ...]:
    if name not in file.tensors:
        raise CorruptFile(
            f"{file.path.name}: tensor {name!r} is missing, which longrope asks for. Fetch the model again."
        )
    numbers = unpack(file.raw(file.tensors[name]), file.tensors[name])["weight"]
    return tuple(float(number) for number in numbers.reshape(-1))


def _yarn(keys: Keys, factor: float) -> YarnRope:
    """Return YaRN's parameters. yarn_log_multiplier is Hugging Face's mscale_all_dim for an mscale of 1.

    llama.cpp reads the betas and yarn_attn_factor only for some architectures. ruvmlx reads them for all
    architectures.
    """
    _refuse_factor(keys, "yarn_ext_factor", 1.0)
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    attention = yarn_scale(factor, 1.0) / (yarn_scale(factor, log_multiplier) or 1.0)
    if keys.get("rope.scaling.yarn_attn_factor") is not None:
        attention = keys.number("rope.scaling.yarn_attn_factor")
    return YarnRope(
        factor,
        _original(keys),
        attention,
        keys.number("rope.scaling.yarn_beta_fast", 32.0),
        keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _alibi_bias_max(keys: Keys, family: Family) -> float:
    if family.has_rope:
        return 0.0
    most, clamp = (keys.number(f"attention.{key}", 0.0) for key in ("max_alibi_bias", "clamp_kqv"))
    if most <= 0 or clamp:
        raise UnsupportedModel(
            f"{keys.where}: {keys.prefix}attention.max_alibi_bias is {most:g}, clamp_kqv {clamp:g}; "
            "a positive number and 0 are run."
        )
    return most


def _rope_dims(keys: Keys, family: Family, head_dim: int) -> int | None:
    if not family.has_rope:
        return 0
    if not family.partial_rope:
        return None
    dims = keys.integer("rope.dimension_count", head_dim)
    return None if dims == head_dim else dims


def _check_widths(keys: Keys, config: ModelConfig) -> None:
    """Raise UnsupportedModel if the file's keys say, for a model with RoPE, that RoPE rotates another number
    of dimensions than in the configuration, or that a head's values have another width than its keys."""
    wanted = {"rope.dimension_count": config.turned_dims, "attention.value_length": config.head_dim}
    if not config.turned_dims:
        del wanted["rope.dimension_count"]
    for key, width in wanted.items():
        if keys.integer(key, width) != width:
            raise UnsupportedModel(
                f"{keys.where}: {keys.prefix}{key} is {keys.get(key)}; only {width} is run."
            )


def _refuse_tensors(file: GGUFFile, family: Family) -> None:
    """Raise UnsupportedModel if the file's tensors show a variant of the family that ruvmlx cannot run.
    llama.cpp also recognises these variants of StableLM by their tensors and not by a key."""
    flags = {"qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors}
    flags["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in file.tensors
    refuse_flags(flags, family, file.path.name)


def _llama3_scaling(file: GGUFFile, config: ModelConfig) -> Llama3Rope | None:
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    check_shapes({ROPE_FREQS: tensor.shape}, {ROPE_FREQS: (config.head_dim // 2,)}, file.path.name)
    divisors = unpack(file.raw(tensor), tensor)["weight"].astype(np.float64)
    if (divisors == 1).all():
        return None
    scaling = llama3_from_divisors(divisors, config.rope_theta)
    if scaling is None:
        raise UnsupportedModel(f"{file.path.name}: {ROPE_FREQS} is not a Llama-3 scaling; no other is run.")
    return scaling
