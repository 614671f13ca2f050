"""MPT as transformers computes it (models/mpt/modeling_mpt.py, version 4.28 and later), in NumPy and float64,
from the tensors of a Hugging Face folder. It shares no code with the project's own reference."""

import json
import math
from pathlib import Path

import numpy as np

from ruvmlx.models.files.safetensors_file import read_safetensors


def slopes(n_heads: int, bias_max: float) -> np.ndarray:
    """build_mpt_alibi_tensor: slopes of the next higher power of two; odd places first, then even ones."""
    power = 2 ** math.ceil(math.log2(n_heads))
    every = 1.0 / 2.0 ** (np.arange(1, power + 1) * (bias_max / power))
    return every if power == n_heads else np.concatenate([every[1::2], every[::2]])[:n_heads]


def logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """tokens [T] -> logits [T, V]."""
    config = json.loads((folder / "config.json").read_text())
    w = {n: t.array().astype(np.float64) for n, t in read_safetensors(folder / "model.safetensors").items()}
    h = w["transformer.wte.weight"][tokens]
    for i in range(config["n_layers"]):
        block = f"transformer.blocks.{i}."
        h = h + _attention(w, block, _norm(h, w[block + "norm_1.weight"]), config)
        up = _norm(h, w[block + "norm_2.weight"]) @ w[block + "ffn.up_proj.weight"].T
        h = h + _gelu(up) @ w[block + "ffn.down_proj.weight"].T
    return _norm(h, w["transformer.norm_f.weight"]) @ w["transformer.wte.weight"].T


def _attention(w: dict[str, np.ndarray], block: str, x: np.ndarray, config: dict) -> np.ndarray:
    n, kv, width = config["n_heads"], config["attn_config"]["kv_n_heads"], config["d_model"]
    d, t = width // n, len(x)
    q, k, v = np.split(x @ w[block + "attn.Wqkv.weight"].T, [width, width + kv * d], axis=1)
    bias = slopes(n, config["attn_config"]["alibi_bias_max"])[:, None] * np.arange(1 - t, 1)
    future = np.triu(np.ones((t, t), bool), 1)
    heads = []
    for h in range(n):
        mine, of = slice(h * d, (h + 1) * d), slice(h // (n // kv) * d, (h // (n // kv) + 1) * d)
        scores = np.where(future, -np.inf, q[:, mine] @ k[:, of].T / math.sqrt(d) + bias[h])
        p = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(p / p.sum(-1, keepdims=True) @ v[:, of])
    return np.concatenate(heads, axis=1) @ w[block + "attn.out_proj.weight"].T


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
