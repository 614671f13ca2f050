"""Makes a random model of a real model's shape, for benchmarks: weights mean nothing, sizes are true.

python -m ruvmlx.apps.bench.random_model mistral-7b m.gguf        # 4.1 GB, some seconds
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.models.byte_level import byte_chars
from ruvmlx.models.gguf_writer import ALIGNMENT, f32, gguf_header, u32


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
    "llama-1b": RandomModelSize(2048, 16, 32, 8, 64, 8192, rope_theta=500000.0),
    "narrow": RandomModelSize(64, 32, 2, 1, 64, 128, vocab_size=512),  # next to no arithmetic (host.py)
}
_BLOCK = 18  # bytes of a Q4_0 block of 32 weights


def tensors(shape: RandomModelSize) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """GGUF name -> (type, shape, bytes)."""
    d, heads, kv = shape.hidden_size, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}

    def add(name: str, *dims: int) -> None:
        size = 4 * dims[0] if len(dims) == 1 else dims[0] * dims[1] // 32 * _BLOCK
        found[name] = ("F32" if len(dims) == 1 else "Q4_0", dims, size)

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


def random_blocks(rng: np.random.Generator, size: int, fan_in: int) -> bytes:
    """Q4_0 blocks whose weights have a variance of about 1 / fan_in, so that activations stay tame."""
    blocks = rng.integers(0, 256, (size // _BLOCK, _BLOCK), np.uint8)
    scale = np.array([1 / (4.6 * np.sqrt(fan_in))], "<f2")
    blocks[:, :2] = scale.view(np.uint8)
    return blocks.tobytes()


def metadata(shape: RandomModelSize) -> dict[str, Any]:
    """GGUF metadata. The tokens are single bytes, one merged pair, and names for the rest."""
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
    """Bytes of the file without its header."""
    return sum(size for _, _, size in tensors(SHAPES[name]).values())


def make(name: str, path: Path) -> Path:
    shape, rng = SHAPES[name], np.random.default_rng(0)
    wanted = tensors(shape)
    with open(path, "wb") as f:
        f.write(gguf_header(metadata(shape), wanted))
        for kind, dims, size in wanted.values():
            data = np.ones(dims[0], "<f4").tobytes() if kind == "F32" else random_blocks(rng, size, dims[1])
            f.write(data + bytes(-len(data) % ALIGNMENT))
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: python -m ruvmlx.apps.bench.random_model {'|'.join(SHAPES)} FILE.gguf")
    print(make(sys.argv[1], Path(sys.argv[2])))
