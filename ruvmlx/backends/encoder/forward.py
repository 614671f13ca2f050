"""This module computes an encoder: a model of BERT's kind that turns texts into vectors
(models/config/encoder.py).

The computation is NumPy in float32. NumPy's BLAS computes the matrix products, which are nearly all of the
work, and the C library the functions of single numbers (LayerNorm, GELU, SwiGLU, RoPE). This is one
implementation for all machines: an encoder reads a text once and keeps nothing, so a KV cache, quantised
products and a decode loop would not make it faster. A GPU would be faster for the largest encoders, but a
second implementation, and its memory beside the chat model's, would be the price.

The rows of all texts form one matrix without padding [N, D] (N tokens of all texts, D hidden size). Only the
attention looks at each text alone, so no mask is needed. The generators yield after each block of rows, so
that the caller can let other work run.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.layers import gelu, layer_norm, rope, swiglu, turns
from ...models.config.encoder import POSITIONS, TYPES, WORDS, EncoderConfig
from ...models.files.mapped import release
from ...models.weights.encoder_files import EncoderWeights

Array = np.ndarray
Steps = Generator[None, None, Array]
ROWS = 256  # the number of rows between two points at which other work can run
SCORES = 1 << 22  # the maximum number of attention scores that are in memory at once (16 MB)


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b. weight: [out, in]; bias: [out] or None."""

    weight: Array
    bias: Array | None

    @classmethod
    def of(cls, weights: EncoderWeights, *names: str, times: float = 1.0) -> "Linear":
        """Return the layer of one matrix, or of several below each other. times: a factor of the first
        matrix and its bias."""
        parts = [weights[f"{name}.weight"] for name in names]
        bias = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
        if times != 1.0:
            parts[0] = parts[0] * np.float32(times)
            bias[:1] = [part * np.float32(times) for part in bias[:1]]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(parts) > 1:
            for part in parts:
                release(part)
        return cls(whole, np.concatenate(bias) if bias else None)

    def __call__(self, x: Array) -> Array:
        y = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        return y


@dataclass(frozen=True)
class Norm:
    """LayerNorm over the last axis."""

    weight: Array
    bias: Array
    eps: float

    @classmethod
    def of(cls, weights: EncoderWeights, name: str, eps: float) -> "Norm":
        return cls(weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def __call__(self, x: Array) -> Array:
        return layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class EncoderLayer:
    """One layer: x = norm(x + attention(x)), then x = norm(x + mlp(x))."""

    config: EncoderConfig
    qkv: Linear  # [3 D, D]: queries (divided by sqrt(head_dim)), keys, values
    out: Linear
    attention_norm: Norm
    gate: Linear | None
    up: Linear
    down: Linear
    mlp_norm: Norm

    @classmethod
    def of(cls, weights: EncoderWeights, config: EncoderConfig, index: int) -> "EncoderLayer":
        at, eps = f"blk.{index}.", config.norm_eps
        scale = config.head_dim**-0.5
        return cls(
            config,
            _joint_projection(weights, at, config.hidden_size, scale),
            Linear.of(weights, f"{at}attn_output"),
            Norm.of(weights, f"{at}attn_output_norm", eps),
            Linear.of(weights, f"{at}ffn_gate") if config.gated_mlp else None,
            Linear.of(weights, f"{at}ffn_up"),
            Linear.of(weights, f"{at}ffn_down"),
            Norm.of(weights, f"{at}layer_output_norm", eps),
        )

    def states(self, x: Array, ends: Sequence[int], turn: Array | None) -> Steps:
        """Return the layer's output [N, D]. x: the input [N, D]. ends: the row after the last row of each
        text. turn: RoPE's rotations [N, head_dim], or None."""
        x = yield from self._attend(x, ends, turn)
        y = np.empty_like(x)
        for rows in blocks(len(x)):
            y[rows] = self.mlp_norm(x[rows] + self._mlp(x[rows]))
            yield
        return y

    def _mlp(self, x: Array) -> Array:
        up = self.up(x)
        return self.down(gelu(up) if self.gate is None else swiglu(self.gate(x), up))

    def _attend(self, x: Array, ends: Sequence[int], turn: Array | None) -> Steps:
        heads, width = self.config.n_heads, self.config.head_dim
        qkv = np.empty((len(x), 3, heads, width), np.float32)
        for rows in blocks(len(x)):
            part = self.qkv(x[rows]).reshape(-1, 3, heads, width)
            qkv[rows] = part if turn is None else _rotate_heads(part, turn[rows])
            yield
        mixed = np.empty_like(x)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield from _mix(qkv[start:end], mixed[start:end])
        y = np.empty_like(x)
        for rows in blocks(len(x)):
            y[rows] = self.attention_norm(x[rows] + self.out(mixed[rows]))
            yield
        return y


def _joint_projection(weights: EncoderWeights, at: str, width: int, scale: float) -> Linear:
    """Return one layer that computes the queries, keys and values together. The layer multiplies the queries
    by `scale`."""
    if f"{at}attn_qkv.weight" not in weights:
        return Linear.of(weights, f"{at}attn_q", f"{at}attn_k", f"{at}attn_v", times=scale)
    whole = Linear.of(weights, f"{at}attn_qkv")
    factor = np.ones(3 * width, np.float32)
    factor[:width] = scale
    return Linear(whole.weight * factor[:, None], None if whole.bias is None else whole.bias * factor)


def _rotate_heads(qkv: Array, turn: Array) -> Array:
    """Return a copy [T, 3, heads, head_dim] in which RoPE has rotated the queries and the keys."""
    tokens, _, heads, width = qkv.shape
    both = np.ascontiguousarray(qkv[:, :2]).reshape(tokens, 2 * heads, width)
    return np.concatenate([rope(both, turn).reshape(tokens, 2, heads, width), qkv[:, 2:]], axis=1)


def _mix(qkv: Array, out: Array) -> Generator[None, None, None]:
    """Write the attention of one text to `out` [T, D]: softmax(q k^T) v of each head. qkv: [T, 3, heads,
    head_dim]; the queries are scaled already."""
    q, k, v = (qkv[:, i].transpose(1, 0, 2) for i in range(3))  # [heads, T, head_dim]
    heads, tokens, width = q.shape
    step = max(1, min(ROWS, SCORES // (heads * tokens)))
    for start in range(0, tokens, step):
        scores = q[:, start : start + step] @ k.transpose(0, 2, 1)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = (scores @ v) / scores.sum(-1, keepdims=True)
        out[start : start + step] = mixed.transpose(1, 0, 2).reshape(-1, heads * width)
        yield


def blocks(count: int) -> list[slice]:
    return [slice(at, at + ROWS) for at in range(0, count, ROWS)]


class Encoder:
    """An open encoder. Any thread can call the methods, one at a time."""

    def __init__(self, config: EncoderConfig, weights: EncoderWeights):
        self._config, self._weights = config, weights
        first = config.position_offset
        self._positions = weights[POSITIONS][first:] if config.rope_theta is None else None
        self._type = weights[TYPES][0] if config.n_types else np.float32(0)
        self._norm = Norm.of(weights, "token_embd_norm", config.norm_eps)
        self._layers = [EncoderLayer.of(weights, config, i) for i in range(config.n_layers)]

    def states(self, texts: Sequence[Sequence[int]]) -> Steps:
        """Return the final states of the tokens of all texts together [N, D]. texts: the token ids of each
        text, with the tokens at its beginning and its end."""
        ends = np.cumsum([len(text) for text in texts]).tolist()
        places = np.concatenate([np.arange(len(text)) for text in texts])
        x = self._norm(
            self._first_states(np.concatenate([np.asarray(text, np.int64) for text in texts]), places)
        )
        turn = self._turn(places)
        for layer in self._layers:
            x = yield from layer.states(x, ends, turn)
        return x

    def vectors(self, texts: Sequence[Sequence[int]]) -> Steps:
        """Return the vector of each text [texts, D], of length 1."""
        states = yield from self.states(texts)
        ends = np.cumsum([len(text) for text in texts]).tolist()
        pooled = np.stack(
            [_pool(states[a:b], self._config.pooling) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        )
        return pooled / np.maximum(np.linalg.norm(pooled, axis=-1, keepdims=True), 1e-9)

    def _first_states(self, ids: Array, places: Array) -> Array:
        x = self._weights.rows(WORDS, ids) + self._type
        return x if self._positions is None else x + self._positions[places]

    def _turn(self, places: Array) -> Array | None:
        if self._config.rope_theta is None:
            return None
        half = self._config.head_dim // 2
        return turns(places, self._config.rope_theta ** (-np.arange(half) / half))


def _pool(states: Array, pooling: str) -> Array:
    if pooling == "mean":
        return states.mean(axis=0)
    return states[0 if pooling == "cls" else -1]
