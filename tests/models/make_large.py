"""Makes a random model of a real model's shape, for benchmarks: weights mean nothing, sizes are true.

python -m tests.models.make_large mistral-7b /tmp/mistral-7b-q4.gguf        # 4.1 GB, some seconds
"""

import sys
from pathlib import Path

import numpy as np

from .gguf_writer import ALIGNMENT, gguf_header
from .make_models import Shape, gguf_metadata

SHAPES = {
    "mistral-7b": Shape(
        hidden_size=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, intermediate_size=14336,
        vocab_size=32000, max_context=8192,
    ),
    "llama-1b": Shape(
        hidden_size=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, intermediate_size=8192,
        vocab_size=32000, max_context=8192, rope_theta=500000.0,
    ),
}  # fmt: skip
_BLOCK = 18  # bytes of a Q4_0 block of 32 weights


def tensors(shape: Shape) -> dict[str, tuple[str, tuple[int, ...], int]]:
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


def make(name: str, path: Path) -> Path:
    shape, rng = SHAPES[name], np.random.default_rng(0)
    wanted = tensors(shape)
    metadata = gguf_metadata(shape)
    known = list(metadata["tokenizer.ggml.tokens"])
    more = shape.vocab_size - len(known)
    metadata["tokenizer.ggml.tokens"] = known + [f"<extra {i}>" for i in range(more)]
    metadata["tokenizer.ggml.token_type"] = np.concatenate(
        [metadata["tokenizer.ggml.token_type"], np.ones(more, np.int32)]
    )
    with open(path, "wb") as f:
        f.write(gguf_header(metadata, wanted))
        for kind, dims, size in wanted.values():
            data = np.ones(dims[0], "<f4").tobytes() if kind == "F32" else random_blocks(rng, size, dims[1])
            f.write(data + bytes(-len(data) % ALIGNMENT))
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: python -m tests.models.make_large {'|'.join(SHAPES)} FILE.gguf")
    print(make(sys.argv[1], Path(sys.argv[2])))
