"""config.json of a Hugging Face or mlx-community folder -> ModelConfig."""

from dataclasses import dataclass
from math import isfinite
from typing import Any

from ..errors import CorruptFile, UnsupportedModel
from .layout import check_config
from .model import Llama3Rope, ModelConfig

MODEL_TYPES = ("llama", "mistral")
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Affine:
    """How a matrix was quantised by MLX."""

    group_size: int
    bits: int


class _Fields:
    """Typed look-ups in config.json; null counts as absent, as in transformers."""

    def __init__(self, data: dict[str, Any], where: str):
        self.data, self.where = data, where

    def _bad(self, key: str, value: Any, expected: str) -> CorruptFile:
        return CorruptFile(f"{self.where}: {key} is {str(value)[:40]!r}; {expected} was expected.")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if type(value) is not int:
            raise self._bad(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self.data.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or abs(value) > 1e300 or not isfinite(value):
            raise self._bad(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._bad(key, value, "an object")
        return value


def config_from_json(data: dict[str, Any], has_head: bool, where: str) -> ModelConfig:
    """`has_head`: the files hold an lm_head.weight, which decides when config.json is silent about tying."""
    _check_kind(data, where)
    fields = _Fields(data, where)
    rope = _rope_table(fields)
    n_heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if n_heads < 1:
        raise CorruptFile(f"{where}: num_attention_heads is {n_heads}; at least 1 was expected.")
    config = ModelConfig(
        model_type=data["model_type"],
        hidden_size=hidden,
        n_layers=fields.integer("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", n_heads),
        head_dim=fields.integer("head_dim", hidden // n_heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        max_context=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings", not has_head),
        rope_scaling=_llama3(rope),
        rope_linear_factor=rope.number("factor") if _rope_type(rope) == "linear" else 1.0,
        sliding_window=_sliding_window(fields),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )
    check_config(config, where)
    return config


def _check_kind(data: dict[str, Any], where: str) -> None:
    """Refuse what would run, but wrongly."""
    if data.get("model_type") not in MODEL_TYPES:
        kind = str(data.get("model_type"))[:40]
        raise UnsupportedModel(f"{where}: model_type {kind!r}; {', '.join(MODEL_TYPES)} are run.")
    if data.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act {str(data['hidden_act'])[:40]!r}; only 'silu' is run.")
    if data.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModel(f"{where}: rope turns only part of each head; only whole heads are run.")
    method = data.get("quantization_config")
    if isinstance(method, dict) and "quant_method" in method:
        raise UnsupportedModel(
            f"{where}: weights quantised by {str(method['quant_method'])[:20]!r}; "
            "MLX affine and plain ones are run."
        )


def _rope_table(fields: _Fields) -> _Fields:
    """rope_parameters (transformers 5) or rope_scaling (before)."""
    table = fields.table("rope_parameters") or fields.table("rope_scaling")
    if any(isinstance(value, dict) for value in table.values()):
        raise UnsupportedModel(
            f"{fields.where}: rope differs between kinds of layers; one rope for all is run."
        )
    return _Fields(table, fields.where)


def _rope_type(rope: _Fields) -> str:
    kind = rope.data.get("rope_type", rope.data.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(
            f"{rope.where}: rope scaling {str(kind)[:40]!r}; none, linear and llama3 are run."
        )
    return kind


def _llama3(rope: _Fields) -> Llama3Rope | None:
    if _rope_type(rope) != "llama3":
        return None
    scaling = Llama3Rope(
        rope.number("factor"),
        rope.number("low_freq_factor", 1.0),
        rope.number("high_freq_factor", 4.0),
        rope.integer("original_max_position_embeddings", 8192),
    )
    sound = scaling.factor >= 1 and 0 < scaling.low_freq_factor < scaling.high_freq_factor
    if not sound or scaling.original_max_position < 1:
        raise CorruptFile(f"{rope.where}: the Llama-3 rope scaling {scaling} does not make sense.")
    return scaling


def _sliding_window(fields: _Fields) -> int | None:
    """Mistral's window holds for all layers, Llama's only where layer_types says so."""
    kinds = fields.data.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if fields.data["model_type"] == "mistral" else "full_attention"]
    if not isinstance(kinds, list) or len({str(kind) for kind in kinds}) != 1:
        raise UnsupportedModel(f"{fields.where}: layer_types differ; all layers of one kind are run.")
    if kinds[0] not in ("sliding_attention", "full_attention"):
        raise UnsupportedModel(f"{fields.where}: layers of type {str(kinds[0])[:40]!r} are not run.")
    if kinds[0] == "full_attention" or fields.data.get("sliding_window") is None:
        return None
    return fields.integer("sliding_window")


def quantization(data: dict[str, Any], where: str) -> tuple[Affine | None, dict[str, Affine | None]]:
    """-> the default, and what single modules have instead (None: not quantised)."""
    table = _Fields(data, where).table("quantization") or _Fields(data, where).table("quantization_config")
    if not table:
        return None, {}
    default = _affine(table, where)
    own: dict[str, Affine | None] = {}
    for module, value in table.items():
        if isinstance(value, dict):
            own[module] = _affine({"group_size": default.group_size, "bits": default.bits, **value}, where)
        elif isinstance(value, bool):
            own[module] = default if value else None
    return default, own


def _affine(table: dict[str, Any], where: str) -> Affine:
    fields = _Fields(table, where)
    if table.get("mode", "affine") != "affine":
        raise UnsupportedModel(
            f"{where}: quantisation mode {str(table['mode'])[:20]!r}; only 'affine' is run."
        )
    affine = Affine(fields.integer("group_size", 64), fields.integer("bits", 4))
    if affine.bits not in AFFINE_BITS or affine.group_size not in AFFINE_GROUPS:
        raise UnsupportedModel(
            f"{where}: {affine.bits}-bit weights in groups of {affine.group_size}; "
            f"bits {AFFINE_BITS} in groups of {AFFINE_GROUPS} are known."
        )
    return affine
