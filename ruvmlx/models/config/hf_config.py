"""This module converts the config.json of a Hugging Face or mlx-community folder to a ModelConfig."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CorruptFile, UnsupportedModel
from ..files.json_fields import Fields
from ..files.small_floats import MODES, is_fp8
from .families import WRAPPED, Family, Window, family_of
from .hf_rope import query_scale, rope_dims, rope_scaling, rope_table, rope_theta
from .layout import check_config, check_layers, layers_without_rope
from .model import ModelConfig
from .mpt import common_fields

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Affine:
    """The quantisation of a matrix in one of MLX's formats. mode: "affine", or a name in MODES of
    small_floats.py."""

    group_size: int
    bits: int
    mode: str = "affine"


def text_config(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the part of config.json that describes the language model: the object `text_config` of a model
    for text and images, else the whole config.json."""
    families = WRAPPED.get(str(data.get("model_type")))
    if families is None:
        return data
    inner = {"model_type": "mistral"} | Fields(data, where).table("text_config")
    if inner["model_type"] not in families:
        # This call raises an error for an unknown model_type, with the reason from families.OTHERS if there
        # is one.
        family_of(inner["model_type"], f"{where}, text_config")
        raise UnsupportedModel(f"{where}: text_config holds a {str(inner['model_type'])[:40]!r} model.")
    shared = {key: data[key] for key in _SHARED if data.get(key) is not None}
    for key in ("quantization", "quantization_config"):
        if isinstance(shared.get(key), dict):
            shared[key] = {text_name(name): value for name, value in shared[key].items()}
    return shared | {key: value for key, value in inner.items() if value is not None}


_SHARED = ("quantization", "quantization_config", "eos_token_id", "bos_token_id")


def text_name(name: str) -> str:
    """Return the name of a language model's tensor without the prefix that a model for text and images puts
    before it."""
    inner = name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.") if inner == name else f"model.{inner}"


def config_from_json(data: dict[str, Any], has_head: bool, where: str) -> ModelConfig:
    """Return a checked ModelConfig. has_head: True if the files have an lm_head.weight. If config.json does
    not have the field tie_word_embeddings, a model without lm_head.weight uses the embedding as its output
    head."""
    data = text_config(data, where)
    family = family_of(data.get("model_type"), where)
    data = common_fields(data, where) if family.model_type == "mpt" else data
    _check_kind(data, family, where)
    fields = Fields(data, where)
    rope = rope_table(fields)
    n_heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if n_heads < 1:
        raise CorruptFile(f"{where}: num_attention_heads is {n_heads}; at least 1 was expected.")
    n_layers = fields.integer("num_hidden_layers")
    check_layers(n_layers, where)
    head_dim = fields.integer("head_dim", hidden // n_heads)
    config = ModelConfig(
        model_type=family.model_type,
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number(family.eps, family.defaults.get(family.eps)),
        rope_theta=rope_theta(fields, rope, family),
        max_context=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings", not has_head),
        rope_scaling=rope_scaling(fields, rope, family),
        biases=_biases(fields, family),
        head_norms=family.head_norms,
        layers_without_rope=_layers_without_rope(fields, n_layers) if family.skips_rope else frozenset(),
        query_scale=query_scale(fields, rope, family),
        layer_norm=family.layer_norm,
        norm_biases=family.norm_biases,
        rope_dims=rope_dims(fields, rope, family, head_dim),
        alibi_bias_max=0.0 if family.has_rope else fields.number("alibi_bias_max"),
        gated_mlp=family.gated_mlp,
    )
    config = replace(config, sliding_window=_sliding_window(fields, family, config))
    check_config(config, where)
    return config


def _check_kind(data: dict[str, Any], family: Family, where: str) -> None:
    """Raise UnsupportedModel if one of the fields that this function checks asks for a computation that
    ruvmlx does not do (replies would be wrong), or names a quant_method other than fp8."""
    refuse_flags(data, family, where)
    if data.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act {str(data['hidden_act'])[:40]!r}; only 'silu' is run.")
    if data.get("partial_rotary_factor") not in (None, 1, 1.0) and not family.partial_rope:
        raise UnsupportedModel(
            f"{where}: partial_rotary_factor is {str(data['partial_rotary_factor'])[:40]!r}: rope turns only "
            "part of each head; only whole heads are run."
        )
    if data.get("rope_traditional") not in (None, False):
        raise UnsupportedModel(
            f"{where}: rope_traditional is {str(data['rope_traditional'])[:40]!r}; "
            "only rope over half-split heads is run."
        )
    method = data.get("quantization_config")
    if isinstance(method, dict) and "quant_method" in method and not is_fp8(data):
        how = str(method["quant_method"])[:20]
        convert = f" Convert it: mlx_lm.convert --hf-path {where} --mlx-path FOLDER"
        raise UnsupportedModel(
            f"{where}: weights quantised by {how!r}; MLX affine and plain ones are run."
            + (convert if how in ("gptq", "awq") else "")
        )


def refuse_flags(data: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise UnsupportedModel if a flag of config.json that ruvmlx cannot run (`family.unsupported`) is
    set."""
    for flag, meaning in family.unsupported.items():
        if data.get(flag) not in (None, False):
            raise UnsupportedModel(
                f"{where}: {flag} is {str(data[flag])[:40]!r}: {meaning}; "
                f"only {family.name} models without it are run."
            )


def _biases(fields: Fields, family: Family) -> frozenset[str]:
    flagged = (modules for key, modules in family.bias_flags.items() if fields.flag(key, False))
    return family.biases.union(*flagged)


def _layers_without_rope(fields: Fields, n_layers: int) -> frozenset[int]:
    """Return the indexes of the layers without RoPE. The field `no_rope_layers` has a 0 for each layer
    without RoPE, else a 1. If config.json does not have this field, every n-th layer has no RoPE; n is
    no_rope_layer_interval, by default 4."""
    turned = fields.data.get("no_rope_layers")
    if turned is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        if interval < 1:
            raise CorruptFile(
                f"{fields.where}: no_rope_layer_interval is {interval}; at least 1 was expected."
            )
        return layers_without_rope(n_layers, interval)
    if not isinstance(turned, list) or len(turned) != n_layers or not all(t in (0, 1) for t in turned):
        raise CorruptFile(
            f"{fields.where}: no_rope_layers is {str(turned)[:40]!r}; {n_layers} times 0 or 1 was expected."
        )
    return frozenset(i for i, t in enumerate(turned) if not t)


def _sliding_window(fields: Fields, family: Family, config: ModelConfig) -> int | None:
    """Return the sliding window in tokens if all layers have the window; None if no layer has a window.
    Raises UnsupportedModel if only some layers have a window."""
    switched = family.window in (Window.FROM_MAX_WINDOW_LAYERS, Window.WITHOUT_ROPE)
    off = switched and not fields.flag("use_sliding_window", False)
    window = None if off or not fields.has("sliding_window") else fields.integer("sliding_window")
    kinds = fields.data.get("layer_types")
    if kinds is None:
        slides = _sliding_layers(fields, family, config) if window is not None else frozenset[int]()
        kinds = [_KINDS[i in slides] for i in range(config.n_layers)]
    if not isinstance(kinds, list) or len(kinds) != config.n_layers:
        raise CorruptFile(
            f"{fields.where}: layer_types is {str(kinds)[:40]!r}; {config.n_layers} names were expected."
        )
    if len({str(kind) for kind in kinds}) != 1:
        raise UnsupportedModel(f"{fields.where}: layer_types differ; all layers of one kind are run.")
    if kinds[0] not in _KINDS:
        raise UnsupportedModel(f"{fields.where}: layers of type {str(kinds[0])[:40]!r} are not run.")
    return window if kinds[0] == _KINDS[True] else None


_KINDS = ("full_attention", "sliding_attention")


def _sliding_layers(fields: Fields, family: Family, config: ModelConfig) -> frozenset[int]:
    match family.window:
        case Window.NO_LAYER:
            return frozenset()
        case Window.EVERY_LAYER:
            return frozenset(range(config.n_layers))
        case Window.FROM_MAX_WINDOW_LAYERS:
            return frozenset(range(max(0, fields.integer("max_window_layers", 28)), config.n_layers))
        case Window.WITHOUT_ROPE:
            return config.layers_without_rope


def quantization(data: dict[str, Any], where: str) -> tuple[Affine | None, dict[str, Affine | None]]:
    """Return the default quantisation of all matrices, and {module: quantisation} for modules that differ
    from the default. None means no quantisation in MLX's formats; for the quant_method fp8, which
    small_floats.py reads, the result is (None, {})."""
    table = Fields(data, where).table("quantization") or Fields(data, where).table("quantization_config")
    if not table or table.get("quant_method") == "fp8":
        return None, {}
    default = _affine(table, where)
    own: dict[str, Affine | None] = {}
    for module, value in table.items():
        if isinstance(value, dict):
            usual = {} if "mode" in value else {"group_size": default.group_size, "bits": default.bits}
            own[module] = _affine(usual | value, where)
        elif isinstance(value, bool):
            own[module] = default if value else None
    return default, own


def _affine(table: dict[str, Any], where: str) -> Affine:
    fields, mode = Fields(table, where), table.get("mode", "affine")
    if isinstance(mode, str) and mode in MODES:
        return _of_mode(fields, mode)
    if mode != "affine":
        known = ", ".join(("affine", *MODES))
        raise UnsupportedModel(f"{where}: quantisation mode {str(mode)[:20]!r}; {known} are run.")
    affine = Affine(fields.integer("group_size", 64), fields.integer("bits", 4))
    if affine.bits not in AFFINE_BITS or affine.group_size not in AFFINE_GROUPS:
        raise UnsupportedModel(
            f"{where}: {affine.bits}-bit weights in groups of {affine.group_size}; "
            f"bits {AFFINE_BITS} in groups of {AFFINE_GROUPS} are known."
        )
    return affine


def _of_mode(fields: Fields, mode: str) -> Affine:
    """Return the quantisation of MLX's float format `mode`. Raises UnsupportedModel if config.json names
    another group size or number of bits than the format has."""
    group, bits = MODES[mode]
    got = fields.integer("group_size", group), fields.integer("bits", bits)
    if got != (group, bits):
        raise UnsupportedModel(
            f"{fields.where}: {mode} with {got[1]} bits in groups of {got[0]}; "
            f"{bits} bits in groups of {group} are run."
        )
    return Affine(group, bits, mode)
