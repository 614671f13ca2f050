"""Small random encoders (models of BERT's kind), as Hugging Face folders and as GGUF files.

    folder = make_encoder(tmp_path / "m", EncoderShape("xlm-roberta"), pooling="cls")
    file = make_gguf_encoder(tmp_path / "m.gguf", EncoderShape("nomic_bert"), pooling="mean", quant="F16")

Weights have GGUF's names here: {"blk.0.attn_q.weight": [out, in]...}.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .encoder_vocabularies import gguf_vocab, tokens_of, write_encoder_tokenizer
from .gguf_writer import encode_blocks, f32, u32, write_gguf
from .make_models import safetensors_bytes

EPS = 1e-5
ROPE_BASE = 1000.0
HF_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
HF_NOMIC = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
POOLING_MODES = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
}


@dataclass(frozen=True)
class EncoderShape:
    """Odd, unequal sizes. context: the number of positions, without the rows before position 0."""

    family: str = "bert"
    hidden: int = 40
    heads: int = 5
    ffn: int = 52
    layers: int = 3
    context: int = 37
    types: int = 2
    seed: int = 0
    spare: int = 3

    @property
    def nomic(self) -> bool:
        return self.family == "nomic_bert"

    @property
    def offset(self) -> int:
        """The row of position 0: that after the padding token's row 1."""
        return 2 if "roberta" in self.family else 0

    @property
    def unigram(self) -> bool:
        return self.family == "xlm-roberta"

    @property
    def vocab(self) -> int:
        """More rows than tokens by `spare`, as nomic-bert pads its table."""
        return len(tokens_of(self.unigram)) + self.spare


def encoder_weights(shape: EncoderShape) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shape.seed)
    d, ffn = shape.hidden, shape.ffn
    out: dict[str, np.ndarray] = {}

    def add(name: str, *sizes: int, spread: float = 0.0, middle: float = 0.0) -> None:
        spread = spread or 1.5 * sizes[-1] ** -0.5
        out[name] = (rng.normal(size=sizes) * spread + middle).astype(np.float32)

    def norm(name: str) -> None:
        add(f"{name}.weight", d, spread=0.2, middle=1.0)
        add(f"{name}.bias", d, spread=0.2)

    add("token_embd.weight", shape.vocab, d, spread=1.0)
    if not shape.nomic:
        add("position_embd.weight", shape.context + shape.offset, d, spread=1.0)
    add("token_types.weight", shape.types, d, spread=1.0)
    norm("token_embd_norm")
    for i in range(shape.layers):
        sizes = {"attn_qkv": (3 * d, d)} if shape.nomic else {f"attn_{n}": (d, d) for n in "qkv"}
        sizes |= {"attn_output": (d, d), "ffn_up": (ffn, d), "ffn_down": (d, ffn)}
        sizes |= {"ffn_gate": (ffn, d)} if shape.nomic else {}
        for name, size in sizes.items():
            add(f"blk.{i}.{name}.weight", *size)
            if not shape.nomic:
                add(f"blk.{i}.{name}.bias", size[0], spread=0.3)
        norm(f"blk.{i}.attn_output_norm")
        norm(f"blk.{i}.layer_output_norm")
    return out


def hf_config(shape: EncoderShape) -> dict[str, Any]:
    if shape.nomic:
        return {
            "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "n_embd": shape.hidden,
            "n_layer": shape.layers, "n_head": shape.heads, "n_inner": shape.ffn, "vocab_size": shape.vocab,
            "n_positions": 4 * shape.context, "max_trained_positions": shape.context,
            "layer_norm_epsilon": EPS, "type_vocab_size": shape.types, "rotary_emb_base": ROPE_BASE,
            "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "activation_function": "swiglu",
            "prenorm": False, "qkv_proj_bias": False, "rotary_scaling_factor": None,
        }  # fmt: skip
    return {
        "model_type": shape.family, "architectures": ["BertModel"], "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "hidden_act": "gelu",
        "intermediate_size": shape.ffn, "vocab_size": shape.vocab, "layer_norm_eps": EPS,
        "max_position_embeddings": shape.context + shape.offset, "type_vocab_size": shape.types,
        "pad_token_id": 1 if shape.offset else 0, "position_embedding_type": "absolute",
    }  # fmt: skip


def hf_name(name: str, shape: EncoderShape) -> str:
    module, _, kind = name.rpartition(".")
    names = HF_NOMIC if shape.nomic else HF_BERT
    if not module.startswith("blk."):
        return f"{names[module]}.{kind}"
    _, layer, module = module.split(".")
    return f"encoder.layer{'s' if shape.nomic else ''}.{layer}.{names[module]}.{kind}"


def make_encoder(
    folder: Path, shape: EncoderShape, pooling: str | None = None, *, dtype: Any = np.float32,
    prefix: str = "", most: int | None = None, **config: Any,
) -> Path:  # fmt: skip
    """A Hugging Face folder. pooling: of 1_Pooling; None: the files of sentence-transformers are missing.
    most: max_seq_length. prefix: of the tensors' names. config: other fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape) | config))
    weights = {prefix + hf_name(n, shape): w.astype(dtype) for n, w in encoder_weights(shape).items()}
    weights |= {"pooler.dense.weight": np.zeros((2, 2), dtype)}  # a head that no vector needs
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    write_encoder_tokenizer(folder, shape.unigram)
    if pooling is not None:
        write_pooling(folder, pooling)
    if most is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))
    return folder


def write_pooling(folder: Path, pooling: str, more: tuple[str, ...] = ("Normalize",)) -> None:
    """The files of sentence-transformers. more: modules behind the pooling."""
    modes = {key: name == pooling for name, key in POOLING_MODES.items()}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    facts = {"word_embedding_dimension": 40, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(facts | modes))
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", *more)]
    (folder / "modules.json").write_text(json.dumps(modules))


POOLING_TYPES = {"none": 0, "mean": 1, "cls": 2, "lasttoken": 3, "rank": 4}


def make_gguf_encoder(
    path: Path, shape: EncoderShape, pooling: str | None = None, quant: str = "F32", **keys: Any
) -> Path:
    """A GGUF file as llama.cpp's converter writes it: without the rows of positions before position 0."""
    arch = "nomic-bert" if shape.nomic else "bert"
    metadata: dict[str, Any] = {
        "block_count": u32(shape.layers),
        "context_length": u32(shape.context),
        "embedding_length": u32(shape.hidden),
        "feed_forward_length": u32(shape.ffn),
        "attention.head_count": u32(shape.heads),
        "attention.layer_norm_epsilon": f32(EPS),
        "attention.causal": False,
    }
    if pooling is not None:
        metadata["pooling_type"] = u32(POOLING_TYPES[pooling])
    if shape.nomic:
        metadata["rope.freq_base"] = f32(ROPE_BASE)
    metadata = {f"{arch}.{key}": value for key, value in (metadata | keys).items()}
    named = {"general.architecture": arch, "general.name": "tiny"} | metadata | gguf_vocab(shape.unigram)
    named["tokenizer.ggml.token_type_count"] = u32(shape.types)
    return write_gguf(path, named, _gguf_tensors(shape, quant))


def _gguf_tensors(shape: EncoderShape, quant: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    out = {}
    for name, w in encoder_weights(shape).items():
        w = w[shape.offset :] if name == "position_embd.weight" else w
        small = w.ndim == 1 or name in ("position_embd.weight", "token_types.weight")
        kind = "F32" if small else quant
        out[name] = (kind, w.shape, encode_blocks(w, kind))
    return out
