"""This module converts the config.json of an MPT model (MosaicML) to the field names that Llama and all other
families have.

The library llm-foundry can build many variants of MPT. The module accepts the variants of _MODEL, _ATTENTION,
_NORMS and _MLPS, and raises UnsupportedModel if one of the fields in these tables has another value.
"""

from collections.abc import Mapping
from typing import Any

from ...errors import CorruptFile, UnsupportedModel
from ..files.json_fields import Fields

BIAS_MAX = 8.0
_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
}
# {field of config.json: the values that ruvmlx accepts}. None among the values means that the field can be
# missing.
_MODEL = {"logit_scale": (None,), "embedding_fraction": (None, 1, 1.0), "no_bias": (None, True)}
_ATTENTION = {
    "alibi": (True,),
    "clip_qkv": (None,),
    "softmax_scale": (None,),
    "qk_ln": (None, False),
    "qk_gn": (None, False),
    "prefix_lm": (None, False),
    "attn_uses_sequence_id": (None, False),
    "sliding_window_size": (None, -1),
}
_NORMS = (None, "layernorm", "low_precision_layernorm")
_MLPS = (None, "mptmlp")


def common_fields(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of config.json, and the model's sizes again under the names that `config_from_json`
    reads."""
    fields = Fields(dict(data), where)
    attention, mlp = fields.table("attn_config"), fields.table("ffn_config")
    _refuse(data, _MODEL, where)
    _refuse(attention, _ATTENTION, f"{where}: attn_config")
    _refuse(data, {"norm_type": _NORMS}, where)
    _refuse(mlp, {"ffn_type": _MLPS}, f"{where}: ffn_config")
    found = {ours: fields.integer(theirs) for ours, theirs in _NAMES.items()}
    found["num_key_value_heads"] = _kv_heads(attention, found["num_attention_heads"], where)
    found["intermediate_size"] = _inner_size(fields, found["hidden_size"])
    numbers = {
        "layer_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "alibi_bias_max": Fields(attention, where).number("alibi_bias_max", BIAS_MAX),
        "rope_theta": 1e4,  # `config_from_json` requires this field, but MPT has no RoPE
    }
    return {**data, **found, **numbers}


def _refuse(table: Mapping[str, Any], accepted: Mapping[str, tuple], where: str) -> None:
    for key, values in accepted.items():
        if table.get(key) not in values:
            raise UnsupportedModel(
                f"{where}: {key} is {str(table.get(key))[:40]!r}; MPT models are run with "
                f"{' or '.join(str(value) for value in values)}."
            )


def _kv_heads(attention: Mapping[str, Any], n_heads: int, where: str) -> int:
    kind = attention.get("attn_type", "multihead_attention")
    if kind == "multiquery_attention":
        return 1
    if kind == "grouped_query_attention":
        return Fields(dict(attention), where).integer("kv_n_heads")
    if kind != "multihead_attention":
        raise UnsupportedModel(f"{where}: attn_type {str(kind)[:40]!r} is not run.")
    return n_heads


def _inner_size(fields: Fields, hidden: int) -> int:
    size = fields.number("expansion_ratio", 4) * hidden
    if size != int(size):
        raise CorruptFile(
            f"{fields.where}: expansion_ratio gives {size:g} numbers; a whole number was expected."
        )
    return int(size)
