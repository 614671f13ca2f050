"""The slow twin of the encoder: one token, one head and one number at a time, in float64."""

from collections.abc import Sequence
from math import cos, erf, exp, sin, sqrt

import numpy as np

from tests.models.encoder_models import EPS, ROPE_BASE, EncoderShape

Rows = list[np.ndarray]


def states_ref(shape: EncoderShape, weights: dict[str, np.ndarray], ids: Sequence[int]) -> np.ndarray:
    """The final states of one text's tokens [T, D]."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    x = [_first(shape, w, token, t) for t, token in enumerate(ids)]
    for i in range(shape.layers):
        layer = {n.removeprefix(f"blk.{i}."): a for n, a in w.items() if n.startswith(f"blk.{i}.")}
        mixed = _attention(shape, layer, x)
        x = [
            _norm(layer, "attn_output_norm", a + _linear(layer, "attn_output", b))
            for a, b in zip(x, mixed, strict=True)
        ]
        x = [_norm(layer, "layer_output_norm", a + _mlp(shape, layer, a)) for a in x]
    return np.stack(x)


def vector_ref(
    shape: EncoderShape, weights: dict[str, np.ndarray], ids: Sequence[int], pooling: str
) -> np.ndarray:
    """The vector of one text, of length 1."""
    states = states_ref(shape, weights, ids)
    pooled = {"mean": sum(states) / len(states), "cls": states[0], "lasttoken": states[-1]}[pooling]
    return pooled / sqrt(sum(number * number for number in pooled))


def _first(shape: EncoderShape, w: dict[str, np.ndarray], token: int, t: int) -> np.ndarray:
    x = w["token_embd.weight"][token] + w["token_types.weight"][0]
    if not shape.nomic:
        x = x + w["position_embd.weight"][t + shape.offset]
    return _norm(w, "token_embd_norm", x)


def _norm(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    mean = sum(x) / len(x)
    spread = sqrt(sum((number - mean) ** 2 for number in x) / len(x) + EPS)
    return (x - mean) / spread * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    y = np.array([row @ x for row in w[f"{name}.weight"]])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _mlp(shape: EncoderShape, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    up = _linear(w, "ffn_up", x)
    if shape.nomic:
        gate = _linear(w, "ffn_gate", x)
        return _linear(
            w, "ffn_down", np.array([g / (1 + exp(-g)) * u for g, u in zip(gate, up, strict=True)])
        )
    return _linear(w, "ffn_down", np.array([u * (1 + erf(u / sqrt(2))) / 2 for u in up]))


def _attention(shape: EncoderShape, w: dict[str, np.ndarray], x: Rows) -> Rows:
    d, width = shape.hidden, shape.hidden // shape.heads
    if shape.nomic:
        all_three = [_linear(w, "attn_qkv", row) for row in x]
        q, k, v = ([row[i * d : (i + 1) * d] for row in all_three] for i in range(3))
    else:
        q, k, v = ([_linear(w, f"attn_{name}", row) for row in x] for name in "qkv")
    out = [np.zeros(d) for _ in x]
    for head in range(shape.heads):
        part = slice(head * width, (head + 1) * width)
        turn = _rotate if shape.nomic else lambda number, t: number
        keys = [turn(row[part], t) for t, row in enumerate(k)]
        for t, row in enumerate(q):
            query = turn(row[part], t)
            scores = [query @ key / sqrt(width) for key in keys]
            odds = [exp(score - max(scores)) for score in scores]
            out[t][part] = sum(o * row[part] for o, row in zip(odds, v, strict=True)) / sum(odds)
    return out


def _rotate(numbers: np.ndarray, t: int) -> np.ndarray:
    """RoPE of one head: numbers i and i + half turn together."""
    half, out = len(numbers) // 2, numbers.copy()
    for i in range(half):
        angle = t * ROPE_BASE ** (-i / half)
        a, b = numbers[i], numbers[i + half]
        out[i], out[i + half] = a * cos(angle) - b * sin(angle), a * sin(angle) + b * cos(angle)
    return out
