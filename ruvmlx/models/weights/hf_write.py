"""This module makes the content of a config.json, and writes the other small files of a Hugging Face folder:
generation_config.json and the tokenizer.

If the model came from a folder, the module copies the folder's files in _COPIED and generation_config.json.
If the model came from a GGUF file, the module makes the files from the loaded configuration and tokenizer.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from ...errors import UnsupportedModel
from ..config.families import Family, Window, family_of
from ..config.hf_config import text_config
from ..config.hf_rope import rope_to_json
from ..config.model import Model, ModelConfig
from ..files.json_files import read_object
from ..files.safetensors_writer import replacing, write_json
from ..text.tokenizer_base import BaseTokenizer
from ..text.tokenizer_bpe import GGUFByteLevelTokenizer
from ..text.tokenizer_spm import SentencePieceTokenizer

_COPIED = (
    "tokenizer*",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
_GENERATION = "generation_config.json"


def config_of(model: Model) -> dict[str, Any]:
    """Return the config.json of a model, without the fields about the storage format of the weights. Raises
    UnsupportedModel for an MPT model."""
    if model.shape.model_type == "mpt":
        raise UnsupportedModel(
            f"{model.name}: an MPT cannot be written: its q, k and v are one matrix for other tools."
        )
    if model.format == "gguf":
        return config_to_json(model.config) | _token_ids(model.tokenizer)
    data = text_config(read_object(model.path / "config.json", missing_ok=False), model.name)
    stored = ("quantization", "quantization_config", "torch_dtype", "dtype")
    return {key: value for key, value in data.items() if key not in stored}


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the content of a config.json that describes `config`. `hf_config.config_from_json` does the
    reverse."""
    family = family_of(config.model_type, "config.json")
    out: dict[str, Any] = {
        "model_type": config.model_type,
        "architectures": [f"{family.name}ForCausalLM"],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        family.eps: config.rms_norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
    }
    out |= {key: modules <= config.biases for key, modules in family.bias_flags.items()}
    if family.partial_rope:
        out["partial_rotary_factor"] = config.turned_dims / config.head_dim
    if family.skips_rope:
        out["no_rope_layers"] = [int(i not in config.layers_without_rope) for i in range(config.n_layers)]
    return out | _window(config, family) | rope_to_json(config)


def _window(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the fields of config.json for the sliding window. For a Mistral or Ministral 3 model, the result
    has no layer_types; transformers then applies the window to all layers, but mlx-lm ignores the window."""
    if not config.sliding_window:
        return {}
    if family.window is Window.EVERY_LAYER:
        return {"sliding_window": config.sliding_window}
    kinds = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * config.n_layers}
    return {"sliding_window": config.sliding_window} | kinds


def _token_ids(tokenizer: Any) -> dict[str, Any]:
    ends = sorted(tokenizer.eos_ids)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def write_companions(model: Model, folder: Path) -> None:
    """Write the tokenizer's files and generation_config.json of `model` into `folder`."""
    if model.format == "gguf":
        write_json(folder / _GENERATION, _token_ids(model.tokenizer) | dict(model.default_sampling))
        _write_tokenizer(model.tokenizer, folder)
        return
    for pattern in (*_COPIED, _GENERATION):
        for file in sorted(model.path.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    if isinstance(tokenizer, GGUFByteLevelTokenizer):
        kind = "PreTrainedTokenizerFast"
        write_json(folder / "tokenizer.json", tokenizer.as_json())
    elif isinstance(tokenizer, SentencePieceTokenizer):
        kind = "LlamaTokenizer"
        with replacing(folder / "tokenizer.model") as file:
            file.write(tokenizer.as_proto())
    else:
        raise UnsupportedModel(f"a tokenizer of kind {type(tokenizer).__name__} cannot be written.")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": kind} | _facts(tokenizer))


def _facts(tokenizer: BaseTokenizer) -> dict[str, Any]:
    names = {i: text for text, i in tokenizer.special_tokens.items()}
    facts: dict[str, Any] = {"add_bos_token": tokenizer.adds_bos, "add_eos_token": False}
    for key, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if token_id in names:
            facts[key] = names[token_id]
    if isinstance(tokenizer, SentencePieceTokenizer):
        facts |= {"add_prefix_space": tokenizer.strips_leading_space, "legacy": False}
    if tokenizer.chat_template:
        facts["chat_template"] = _with_default_system(tokenizer) + tokenizer.chat_template
    return facts


def _with_default_system(tokenizer: Any) -> str:
    """Return the beginning of a chat template that adds the tokenizer's `default_system` to a conversation
    without a system message and without tools, as `BaseTokenizer.encode_chat` does. Return "" if the
    tokenizer has no `default_system`."""
    if tokenizer.default_system is None:
        return ""
    message = json.dumps({"role": "system", "content": tokenizer.default_system})
    return (
        "{%- if not tools and not messages | selectattr('role', 'equalto', 'system') | list -%}"
        f"{{%- set messages = [{message}] + messages -%}}"
        "{%- endif -%}"
    )
