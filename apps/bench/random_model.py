"""This module makes a model with random weights and a real model's shape, for benchmarks. The weights have no
meaning, but the layers' matrices of mistral-7b, llama-8b and llama-1b have the real model's sizes.

python -m ruvmlx.apps.bench.random_model mistral-7b m.gguf              # writes 4.1 GB in some seconds
python -m ruvmlx.apps.bench.random_model mistral-7b m.gguf Q4_K_M 6     # writes a model with only 6 layers
"""

import sys
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.models.files.gguf_types import ROWS
from ruvmlx.models.files.gguf_writer import ALIGNMENT, f32, gguf_header, u32
from ruvmlx.models.text.byte_level import byte_chars


@dataclass(frozen=True)
class RandomModelSize:
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 32000
    max_context: int = 8192
    rope_theta: float = 10000.0


SHAPES = {
    "mistral-7b": RandomModelSize(4096, 32, 32, 8, 128, 14336),
    "llama-8b": RandomModelSize(4096, 32, 32, 8, 128, 14336, 128256, 131072, rope_theta=500000.0),
    "llama-1b": RandomModelSize(2048, 16, 32, 8, 64, 8192, rope_theta=500000.0),
    # a model with almost no arithmetic in a step
    "narrow": RandomModelSize(64, 32, 2, 1, 64, 128, vocab_size=512),
}
BLOCKS = {row.name: row for row in ROWS}
TYPES = ("Q4_0", "Q4_K_M")


def tensors(shape: RandomModelSize, kind: str = "Q4_0") -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return {GGUF name: (type, shape, bytes)} of all tensors of a model. kind: the quantisation, one of
    TYPES."""
    d, heads, kv = shape.hidden_size, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}

    def add(name: str, *dims: int) -> None:
        row = BLOCKS["F32" if len(dims) == 1 else matrix_type(name, kind, shape.n_layers)]
        found[name] = (row.name, dims, prod(dims) // row.block * row.nbytes)

    add("token_embd.weight", shape.vocab_size, d)
    for i in range(shape.n_layers):
        block = f"blk.{i}."
        add(block + "attn_norm.weight", d)
        add(block + "attn_q.weight", heads, d)
        add(block + "attn_k.weight", kv, d)
        add(block + "attn_v.weight", kv, d)
        add(block + "attn_output.weight", d, heads)
        add(block + "ffn_norm.weight", d)
        add(block + "ffn_gate.weight", shape.intermediate_size, d)
        add(block + "ffn_up.weight", shape.intermediate_size, d)
        add(block + "ffn_down.weight", d, shape.intermediate_size)
    add("output_norm.weight", d)
    add("output.weight", shape.vocab_size, d)
    return found


def matrix_type(name: str, kind: str, n_layers: int) -> str:
    """Return the type that llama.cpp's quantiser gives to a matrix. In Q4_K_M, the output head and the v and
    down matrices of some layers have the type Q6_K."""
    if kind != "Q4_K_M":
        return kind
    if name == "output.weight":
        return "Q6_K"
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return "Q4_K"
    i, eighth = int(name.split(".")[1]), n_layers // 8
    more = i < eighth or i >= 7 * n_layers // 8 or (i - eighth) % 3 == 2
    return "Q6_K" if more else "Q4_K"


def random_blocks(rng: np.random.Generator, kind: str, size: int, fan_in: int) -> bytes:
    """Return the bytes of random quantised blocks. The blocks' weights have a variance of about 1 / fan_in,
    so that activations stay small.

    kind: the type of the blocks
    size: the number of bytes
    fan_in: the number of inputs of the matrix
    """
    blocks = rng.integers(0, 256, (size // BLOCKS[kind].nbytes, BLOCKS[kind].nbytes), np.uint8)
    scale = 1 / (4.6 * np.sqrt(fan_in))  # 4.6: the standard deviation of four random bits
    if kind == "Q4_0":
        _put(blocks, 0, scale)
    elif kind == "Q4_K":
        _put(blocks, 0, scale / 32)
        _put(blocks, 2, scale / 32 * 7.5)
        blocks[:, 4:16] = [0xA0] * 8 + [0] * 4  # set all scales and minimums to 32
    else:
        blocks[:, 192:208] = 32
        # a number of six random bits has four times the standard deviation of a number of four bits
        _put(blocks, 208, scale / 4 / 32)
    return blocks.tobytes()


def _put(blocks: np.ndarray, at: int, value: float) -> None:
    blocks[:, at : at + 2] = np.array([value], "<f2").view(np.uint8)


def metadata(shape: RandomModelSize) -> dict[str, Any]:
    """Return the model's GGUF metadata. The vocabulary has single bytes, one merged pair, and invented names
    for all other ids."""
    chars = ["<s>", "</s>", *byte_chars(), "th"]
    tokens = chars + [f"<extra {i}>" for i in range(shape.vocab_size - len(chars))]
    types = np.ones(shape.vocab_size, np.int32)
    types[:2] = 3
    return {
        "general.architecture": "llama",
        "general.name": "random",
        "llama.block_count": u32(shape.n_layers),
        "llama.context_length": u32(shape.max_context),
        "llama.embedding_length": u32(shape.hidden_size),
        "llama.feed_forward_length": u32(shape.intermediate_size),
        "llama.attention.head_count": u32(shape.n_heads),
        "llama.attention.head_count_kv": u32(shape.n_kv_heads),
        "llama.attention.key_length": u32(shape.head_dim),
        "llama.attention.value_length": u32(shape.head_dim),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "llama.rope.dimension_count": u32(shape.head_dim),
        "llama.rope.freq_base": f32(shape.rope_theta),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": u32(0),
        "tokenizer.ggml.eos_token_id": u32(1),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def nbytes(name: str) -> int:
    """Return the number of bytes of a random Q4_0 model's file without its header. name: a key of SHAPES."""
    return sum(size for _, _, size in tensors(SHAPES[name]).values())


def make(name: str, path: Path, kind: str = "Q4_0", layers: int | None = None) -> Path:
    """Write a random model to `path`, and return the path.

    name: a key of SHAPES; kind: the quantisation, one of TYPES
    layers: the number of layers, for measurements of the time per layer; None for all layers
    """
    shape, rng = SHAPES[name], np.random.default_rng(0)
    shape = replace(shape, n_layers=layers or shape.n_layers)
    wanted = tensors(shape, kind)
    with open(path, "wb") as f:
        f.write(gguf_header(metadata(shape), wanted))
        for stored, dims, size in wanted.values():
            f.write(_data(rng, stored, dims, size) + bytes(-size % ALIGNMENT))
    return path


def _data(rng: np.random.Generator, kind: str, dims: tuple[int, ...], size: int) -> bytes:
    if kind == "F32":
        return np.ones(dims[0], "<f4").tobytes()
    return random_blocks(rng, kind, size, dims[1])


def main(arguments: list[str]) -> None:
    name, file, kind, layers = [*arguments, *["", "", "Q4_0", "0"][len(arguments) :]][:4]
    if name not in SHAPES or not file or kind not in TYPES or not layers.isdigit() or len(arguments) > 4:
        names = f"{'|'.join(SHAPES)} FILE.gguf [{'|'.join(TYPES)} [LAYERS]]"
        sys.exit(f"usage: python -m ruvmlx.apps.bench.random_model {names}")
    print(make(name, Path(file), kind, int(layers) or None))


if __name__ == "__main__":
    main(sys.argv[1:])
