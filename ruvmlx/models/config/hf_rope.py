"""This module reads RoPE's parameters from config.json: `rope_parameters` (transformers 5), `rope_scaling`
(older versions) and `rope_theta`.

For most values that transformers and mlx-lm read differently, or that only one of the two reads, the module
raises UnsupportedModel.
"""

import math
from typing import Any

from ...errors import CorruptFile, UnsupportedModel
from ..files.json_fields import Fields
from .families import Family
from .model import ModelConfig, QueryScale
from .rope_scaling import DynamicRope, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope

ORIGINAL = "original_max_position_embeddings"
BETA = "llama_4_scaling_beta"
PARTIAL = "partial_rotary_factor"


def rope_table(fields: Fields) -> Fields:
    """Return the parameters of RoPE: the objects `rope_parameters` and `rope_scaling` of config.json joined.
    The result is empty if config.json has neither object. Raises UnsupportedModel if the two objects disagree
    on a field, or if RoPE differs between layers."""
    new, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    if any(isinstance(value, dict) for table in (new, old) for value in table.values()):
        raise UnsupportedModel(
            f"{fields.where}: rope differs between kinds of layers; one rope for all is run."
        )
    differ = sorted(key for key in new.keys() & old.keys() if new[key] != old[key])
    if differ:
        raise UnsupportedModel(
            f"{fields.where}: {differ[0]} is {str(new[differ[0]])[:40]!r} in rope_parameters and "
            f"{str(old[differ[0]])[:40]!r} in rope_scaling; one of the two is run."
        )
    return Fields(old | new, fields.where)


def rope_theta(fields: Fields, rope: Fields, family: Family) -> float:
    if rope.has("rope_theta") and fields.has("rope_theta"):
        inner, outer = rope.number("rope_theta"), fields.number("rope_theta")
        if inner != outer:
            raise UnsupportedModel(
                f"{fields.where}: rope_theta is {outer:g}, and {inner:g} in rope's own table; "
                "one of the two is run."
            )
    return (rope if rope.has("rope_theta") else fields).number(
        "rope_theta", family.defaults.get("rope_theta")
    )


def rope_dims(fields: Fields, rope: Fields, family: Family, head_dim: int) -> int | None:
    """Return how many of the numbers in each head RoPE rotates: partial_rotary_factor * head_dim, rounded
    down. Return None if RoPE rotates all numbers of a head, and 0 for a family without RoPE."""
    if not family.partial_rope:
        return None if family.has_rope else 0
    factor = (rope if rope.has(PARTIAL) else fields).number(PARTIAL)
    if not 0 < factor <= 1 or (fields.has(PARTIAL) and fields.number(PARTIAL) != factor):
        raise CorruptFile(
            f"{fields.where}: {PARTIAL} is {factor:g}; one number over 0, at most 1, was expected."
        )
    dims = int(factor * head_dim)
    return None if dims == head_dim else dims


def rope_scaling(fields: Fields, rope: Fields, family: Family) -> RopeScaling | None:
    """Return RoPE's scaling for long contexts, or None if RoPE is not scaled."""
    if not family.partial_rope:
        _refuse(rope, PARTIAL, (1,), "only whole heads are turned")
    elif _kind(rope) != "default":
        raise UnsupportedModel(
            f"{rope.where}: rope scaling {_kind(rope)[:40]!r}; {family.name} models are run without."
        )
    match _kind(rope):
        case "default":
            return None
        case "linear":
            return LinearRope(rope.number("factor"))
        case "dynamic":
            return DynamicRope(rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
            return Llama3Rope(rope.number("factor"), low, high, _original(fields, rope))
        case "yarn":
            return _yarn(fields, rope)
        case "longrope":
            return _longrope(fields, rope)
        case kind:
            raise UnsupportedModel(
                f"{rope.where}: rope scaling {kind[:40]!r}; none, linear, dynamic, llama3, yarn and longrope "
                "are run."
            )


def _kind(rope: Fields) -> str:
    new, old = rope.data.get("rope_type"), rope.data.get("type")
    if new is not None and old is not None and new != old:
        raise UnsupportedModel(
            f"{rope.where}: rope has rope_type {str(new)[:20]!r} and type {str(old)[:20]!r}; "
            "one of the two is run."
        )
    return str(next((kind for kind in (new, old) if kind is not None), "default"))


def _refuse(rope: Fields, key: str, accepted: tuple, why: str) -> None:
    value = rope.data.get(key)
    if value is not None and value not in accepted:
        raise UnsupportedModel(f"{rope.where}: rope's {key} is {str(value)[:40]!r}; {why}.")


def _original(fields: Fields, rope: Fields) -> int:
    """Return original_max_position_embeddings: the context length (tokens) for which the model was trained
    before RoPE's scaling. The object with RoPE's parameters must have this field, because transformers and
    mlx-lm have different defaults."""
    inside = _context(rope, ORIGINAL)
    if fields.has(ORIGINAL) and fields.integer(ORIGINAL) != inside:
        raise UnsupportedModel(
            f"{rope.where}: {ORIGINAL} is {fields.integer(ORIGINAL)}, and {inside} in rope's own table; "
            "one of the two is run."
        )
    return inside


def _context(fields: Fields, key: str) -> int:
    value = fields.integer(key)
    if not 1 < value < 1 << 31:
        raise CorruptFile(f"{fields.where}: {key} is {str(value)[:40]}; a number of tokens was expected.")
    return value


def _yarn(fields: Fields, rope: Fields) -> YarnRope:
    _refuse(rope, "truncate", (True,), "only whole pairs bound the blend")
    factor = rope.number("factor")
    attention = rope.number("attention_factor", _yarn_attention(rope, factor))
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    return YarnRope(factor, _original(fields, rope), attention, fast, slow)


def _yarn_attention(rope: Fields, factor: float) -> float:
    """Return YaRN's factor of queries and keys, (0.1 m ln(factor) + 1) / (0.1 m_all ln(factor) + 1), where m
    is mscale and m_all is mscale_all_dim; without these two fields, return 0.1 ln(factor) + 1. For a factor
    of at most 1, the result is 1."""
    mscale, all_dims = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if not all_dims and (not rope.has("mscale") or mscale == 1):
        return yarn_scale(factor, 1.0)
    if not (mscale > 0 and all_dims > 0):
        raise UnsupportedModel(
            f"{rope.where}: rope's mscale is {mscale:g} with mscale_all_dim {all_dims:g}; "
            "either both or none of them is run."
        )
    return yarn_scale(factor, mscale) / yarn_scale(factor, all_dims)


def yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(fields: Fields, rope: Fields) -> LongRope:
    original = _original(fields, rope)
    stretch = _context(fields, "max_position_embeddings") / original
    if rope.number("factor", stretch) != stretch and not rope.has("attention_factor"):
        raise UnsupportedModel(
            f"{rope.where}: rope's factor is {rope.number('factor'):g}; "
            f"only max_position_embeddings / {ORIGINAL} ({stretch:g}) is run."
        )
    attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return LongRope(
        original,
        rope.number("attention_factor", attention),
        rope.numbers("short_factor"),
        rope.numbers("long_factor"),
    )


def query_scale(fields: Fields, rope: Fields, family: Family) -> QueryScale | None:
    return QueryScale(rope.number(BETA), _original(fields, rope)) if family.scales_queries else None


def rope_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json that describe RoPE, without partial_rotary_factor: `rope_theta`, and
    `rope_scaling` if RoPE is scaled; for a model that scales queries, only `rope_parameters`."""
    out: dict[str, Any] = {"rope_theta": config.rope_theta}
    table = _scaling_to_json(config.rope_scaling)
    # mlx-lm reads the RoPE of a Ministral 3 model only from the table `rope_parameters`
    if config.query_scale is not None:
        table = {"rope_type": "default"} | table | out
        table |= {BETA: config.query_scale.beta, ORIGINAL: config.query_scale.original_max_position}
        return {"rope_parameters": table}
    return out | ({"rope_scaling": table} if table else {})


def _scaling_to_json(scaling: RopeScaling | None) -> dict[str, Any]:
    match scaling:
        case None:
            return {}
        case LinearRope() | DynamicRope():
            kind = "linear" if isinstance(scaling, LinearRope) else "dynamic"
            return {"rope_type": kind, "factor": scaling.factor}
        case Llama3Rope():
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            table = {"rope_type": "llama3", "factor": scaling.factor, ORIGINAL: scaling.original_max_position}
            return table | {"low_freq_factor": low, "high_freq_factor": high}
        case YarnRope():
            table = {"rope_type": "yarn", "factor": scaling.factor, ORIGINAL: scaling.original_max_position}
            table |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            return table | _yarn_attention_to_json(scaling)
        case LongRope():
            table = {"rope_type": "longrope", ORIGINAL: scaling.original_max_position}
            table |= {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
            return table | {"attention_factor": scaling.attention_factor}


def _yarn_attention_to_json(scaling: YarnRope) -> dict[str, float]:
    """Return the fields of config.json for YaRN's attention factor: none for the default factor, mscale and
    mscale_all_dim for the factor 1, else attention_factor, which mlx-lm does not read."""
    if math.isclose(scaling.attention_factor, yarn_scale(scaling.factor, 1.0)):
        return {}
    if scaling.attention_factor == 1:
        return {"mscale": 1.0, "mscale_all_dim": 1.0}
    return {"attention_factor": scaling.attention_factor}
