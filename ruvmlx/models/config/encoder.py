"""This module describes encoders: models of BERT's kind, which turn a text into a vector and write no text.

An encoder adds three vectors for each token (of the token, of its position and of the text's type) and runs
layers of attention and MLP over them. Every token sees all tokens of the text. A LayerNorm follows each sum.
RoBERTa and XLM-R count positions from a later row of the table. nomic-bert has RoPE instead of the vectors of
positions, SwiGLU instead of GELU, and no biases. (Devlin et al. 2019; Nussbaum et al. 2024)
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from ...errors import CorruptFile, UnsupportedModel
from ...platform.files import read_ordinary
from ..files.json_fields import Fields
from ..files.json_files import read_object
from .layout import LAYER_LIMIT
from .model import ModelShape

WORDS, POSITIONS, TYPES = "token_embd.weight", "position_embd.weight", "token_types.weight"
POOLINGS = ("mean", "cls", "lasttoken")
NOMIC = "nomic_bert"
# {model_type in config.json: True if position 0 is the row after that of the padding token}
ENCODERS = {"bert": False, "roberta": True, "xlm-roberta": True, NOMIC: False}
GGUF_ENCODERS = {"bert": "bert", "nomic-bert": NOMIC}  # {general.architecture of GGUF files: model_type}
GELU = ("gelu", "gelu_python")  # names in config.json of the GELU that is computed with the error function


@dataclass(frozen=True)
class EncoderConfig(ModelShape):
    """The configuration of an encoder.

    pooling: how the tokens' states become the vector of the text: "mean", "cls" (the first token's state) or
        "lasttoken"
    position_offset: the row of the table of positions that belongs to position 0
    rope_theta: the base of RoPE's frequencies; None: the encoder has a table of positions
    gated_mlp: True: the MLP is down(silu(gate(x)) * up(x)); False: the MLP is down(gelu(up(x)))
    biases: True if the matrices have biases
    """

    writes: ClassVar[bool] = False

    n_heads: int
    intermediate_size: int
    norm_eps: float
    n_types: int
    pooling: str = "mean"
    position_offset: int = 0
    rope_theta: float | None = None
    gated_mlp: bool = False
    biases: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for _, shape in encoder_tensors(self))


def is_encoder(data: Mapping[str, Any]) -> bool:
    """Return True if config.json describes an encoder that ruvmlx runs."""
    name = data.get("model_type")
    return isinstance(name, str) and name in ENCODERS


def is_gguf_encoder(metadata: Mapping[str, Any]) -> bool:
    """Return True if the keys of a GGUF file describe an encoder that ruvmlx runs."""
    name = metadata.get("general.architecture")
    return isinstance(name, str) and name in GGUF_ENCODERS


def folder_encoder(path: Path, data: dict[str, Any], where: str) -> EncoderConfig:
    """Return the configuration of the encoder in a folder. data: the content of config.json. Raises
    UnsupportedModel if the vectors need a step that ruvmlx does not run."""
    _refuse_tasks(data, where)
    read = _read_nomic if data["model_type"] == NOMIC else _read_bert
    pooling = _pooling(path, where)
    most = Fields(read_object(path / "sentence_bert_config.json"), where).integer("max_seq_length", 0)
    facts = read(Fields(data, where))
    facts["max_context"] = min(facts["max_context"], most) if most > 0 else facts["max_context"]
    config = EncoderConfig(model_type=data["model_type"], tie_word_embeddings=False, pooling=pooling, **facts)
    check_encoder(config, where)
    return config


def _refuse_tasks(data: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedModel for an encoder that is trained for a task other than embeddings."""
    named = data.get("architectures")
    for name in named if isinstance(named, list) else []:
        if str(name).endswith(("Classification", "QuestionAnswering", "MultipleChoice")):
            raise UnsupportedModel(
                f"{where}: {str(name)[:60]} ranks or classifies texts; only encoders that embed are run."
            )


def _read_bert(fields: Fields) -> dict[str, Any]:
    expected = {"position_embedding_type": ("absolute",), "hidden_act": GELU, "is_decoder": (False,)}
    _refuse_others(fields, expected)
    offset = 1 + fields.integer("pad_token_id", 1) if ENCODERS[fields.data["model_type"]] else 0
    return {
        "hidden_size": fields.integer("hidden_size"),
        "n_layers": fields.integer("num_hidden_layers"),
        "n_heads": fields.integer("num_attention_heads"),
        "intermediate_size": fields.integer("intermediate_size"),
        "vocab_size": fields.integer("vocab_size"),
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
        "n_types": fields.integer("type_vocab_size", 2),
        "max_context": fields.integer("max_position_embeddings") - offset,
        "position_offset": offset,
    }


def _read_nomic(fields: Fields) -> dict[str, Any]:
    off, none = (False,), (None, 0)
    expected = {
        "activation_function": ("swiglu",), "prenorm": off, "parallel_block": off, "causal": off,
        "use_rms_norm": off, "qkv_proj_bias": off, "mlp_fc1_bias": off, "mlp_fc2_bias": off,
        "rotary_emb_interleaved": off, "rotary_emb_fraction": (1, 1.0), "rotary_emb_scale_base": none,
        "rotary_scaling_factor": none, "num_experts": none, "moe_every_n_layers": none,
    }  # fmt: skip
    _refuse_others(fields, expected)
    hidden, trained = fields.integer("n_embd"), fields.integer("max_trained_positions", 0)
    most = fields.integer("n_positions")
    return {
        "hidden_size": hidden,
        "n_layers": fields.integer("n_layer"),
        "n_heads": fields.integer("n_head"),
        "intermediate_size": fields.integer("n_inner", 4 * hidden),
        "vocab_size": fields.integer("vocab_size"),
        "norm_eps": fields.number("layer_norm_epsilon", 1e-12),
        "n_types": fields.integer("type_vocab_size", 0),
        "max_context": min(most, trained) if trained > 0 else most,
        "rope_theta": fields.number("rotary_emb_base", 10000.0),
        "gated_mlp": True,
        "biases": False,
    }


def _refuse_others(fields: Fields, expected: Mapping[str, tuple]) -> None:
    """Raise UnsupportedModel if a field of config.json has another value than the expected ones. A missing
    field passes."""
    for name, values in expected.items():
        if name in fields.data and fields.data[name] is not None and fields.data[name] not in values:
            raise UnsupportedModel(
                f"{fields.where}: {name} is {str(fields.data[name])[:40]!r}; only {values[0]!r} is run."
            )


def _pooling(path: Path, where: str) -> str:
    """Return the name of the pooling: the rule that makes one vector from the states of all tokens. The
    function reads the rule from the files of the library sentence-transformers. A folder without these files
    has the rule "mean"."""
    for name in _module_types(path):
        if name not in ("Transformer", "Pooling", "Normalize"):
            raise UnsupportedModel(
                f"{where}: its vectors go through a module {name[:40]!r}, which is not run."
            )
    found = read_object(path / "1_Pooling" / "config.json")
    modes = [key.removeprefix("pooling_mode_") for key, value in found.items() if value is True]
    named = [
        mode.removesuffix("_tokens").removesuffix("_token") for mode in modes if mode != "include_prompt"
    ]
    if not named:
        return "mean"
    if len(named) > 1 or named[0] not in POOLINGS:
        raise UnsupportedModel(
            f"{where}: pooling {', '.join(named)[:60]}; one of {', '.join(POOLINGS)} is run."
        )
    return named[0]


def _module_types(path: Path) -> list[str]:
    """Return the class names in modules.json, for example "Pooling". The file holds a list."""
    try:
        entries = json.loads(read_ordinary(path / "modules.json", 1 << 20))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        raise CorruptFile(f"{path.name}: modules.json cannot be read. Fetch the model again.") from None
    named = (
        [entry.get("type") for entry in entries if isinstance(entry, dict)]
        if isinstance(entries, list)
        else []
    )
    return [str(name).rpartition(".")[2] for name in named]


def check_encoder(config: EncoderConfig, where: str) -> None:
    """Raise CorruptFile if a number of the configuration is impossible, before the program allocates memory
    of these sizes."""
    for name in ("hidden_size", "n_heads", "intermediate_size", "vocab_size", "max_context"):
        value = getattr(config, name)
        if not 0 < value < 1 << 31:
            raise CorruptFile(f"{where}: {name} is {value}; a positive number was expected.")
    if not 0 < config.n_layers <= LAYER_LIMIT:
        raise CorruptFile(f"{where}: n_layers is {config.n_layers}; 1 to {LAYER_LIMIT} were expected.")
    if config.hidden_size % config.n_heads or (config.rope_theta and config.head_dim % 2):
        raise CorruptFile(f"{where}: {config.hidden_size} numbers do not fit {config.n_heads} heads.")
    sound = (
        0 < config.norm_eps < 1 and 0 <= config.n_types < 1 << 16 and 0 <= config.position_offset < 1 << 16
    )
    if not sound or not (config.rope_theta is None or 1 <= config.rope_theta < 1e12):
        raise CorruptFile(f"{where}: the configuration of the encoder does not make sense.")


def encoder_tensors(config: EncoderConfig, fused: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (GGUF's name, shape) of each tensor. fused: True if one matrix computes queries, keys and
    values."""
    d, ffn = config.hidden_size, config.intermediate_size
    yield WORDS, (config.vocab_size, d)
    if config.rope_theta is None:
        yield POSITIONS, (config.max_context + config.position_offset, d)
    if config.n_types:
        yield TYPES, (config.n_types, d)
    yield from _norm("token_embd_norm", d)
    for i in range(config.n_layers):
        rows = {"attn_qkv": (3 * d, d)} if fused else dict.fromkeys(("attn_q", "attn_k", "attn_v"), (d, d))
        rows |= {"attn_output": (d, d), "ffn_up": (ffn, d), "ffn_down": (d, ffn)}
        rows |= {"ffn_gate": (ffn, d)} if config.gated_mlp else {}
        for name, shape in rows.items():
            yield f"blk.{i}.{name}.weight", shape
            if config.biases:
                yield f"blk.{i}.{name}.bias", shape[:1]
        yield from _norm(f"blk.{i}.attn_output_norm", d)
        yield from _norm(f"blk.{i}.layer_output_norm", d)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
