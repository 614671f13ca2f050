"""This module is the attention of each layer of the MLX graph (graph.py). The module computes the attention
of mlx-lm's Llama, with the additions of other model families.

A model family can apply a norm to q and k of each head, scale RoPE's frequencies, rotate only a part of each
head or use no RoPE, scale queries by their position, and add ALiBi's biases to the attention scores. The
submodules of `Attention` (q_proj ...) have the same names as in mlx-lm, because LoRA and training use these
names.
"""

from typing import Any

import numpy as np

from ...models.config.alibi import alibi_slopes
from ...models.config.model import ModelConfig, QueryScale
from ...models.config.rope import rope
from ...platform import mlxlm
from ...platform.mx import mx, nn

_base = mlxlm.load("models.base")


class MLXRope(nn.Module):
    """A call returns factor * x, in which RoPE rotates the first turned_dims numbers of each head, for the
    positions offset ... offset + T - 1. x: [B, H, T, d]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        turn = rope(config)
        self._dims, self._factor = config.turned_dims, turn.factor
        self._periods = mx.array((1 / turn.frequencies).astype(np.float32))

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        x = x if self._factor == 1 else x * self._factor
        return mx.fast.rope(
            x, self._dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods
        )


def query_scales(scale: QueryScale, offset: int | mx.array, n: int) -> mx.array:
    """Return, for the n tokens at the positions `offset` ... offset + n - 1, the factor of each query as
    float32 [n, 1], or [B, 1, n, 1] for an array of B offsets."""
    positions = mx.arange(n) + (offset[:, None] if isinstance(offset, mx.array) and offset.ndim else offset)
    scales = 1 + scale.beta * mx.log1p(mx.floor(positions / scale.original_max_position))
    return scales[:, None, :, None] if scales.ndim == 2 else scales[:, None]


class DistanceBias:
    """A maker of ALiBi's bias of the attention scores, joined with the causal mask. All layers of a graph
    share one object, which keeps the last bias."""

    def __init__(self, config: ModelConfig):
        self.slopes = alibi_slopes(config.n_heads, config.alibi_bias_max)
        self._made: tuple[Any, mx.array | None] = (None, None)

    def mask(self, n: int, total: int, dtype: mx.Dtype) -> mx.array:
        """Return [n_heads, n, total] for the last n of `total` tokens: each head's slope * (key's position -
        query's position), but -inf for keys at later positions than the query."""
        if self._made[0] != (n, total, dtype) or self._made[1] is None:
            away = mx.arange(total)[None] - mx.arange(total - n, total)[:, None]
            bias = mx.where(away <= 0, mx.array(self.slopes)[:, None, None] * away, -mx.inf)
            self._made = (n, total, dtype), bias.astype(dtype)
        return self._made[1]  # type: ignore[return-value]


class UngatedMLP(nn.Module):
    """An MLP without a gate: it computes down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dims, inner = config.hidden_size, config.intermediate_size
        self.up_proj = nn.Linear(dims, inner, "up_proj" in config.biases)
        self.down_proj = nn.Linear(inner, dims, "down_proj" in config.biases)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu(self.up_proj(x)))


class Attention(nn.Module):
    """A module that computes softmax(q k^T / sqrt(d)) v and the output projection: [B, T, D] of x [B, T, D].
    H: number of query heads; K: number of key/value heads; d: head_dim."""

    def __init__(self, config: ModelConfig, layer: int, bias: DistanceBias | None = None):
        super().__init__()
        self.bias = bias
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.turns = layer not in config.layers_without_rope and config.turned_dims > 0
        # The kernels of tiered caches rotate whole heads. If RoPE rotates only a part of a head, MLX rotates
        # the part before the kernels run.
        self.kernels_turn = self.turns and config.turned_dims == config.head_dim
        dims, q, kv = config.hidden_size, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_proj = nn.Linear(dims, q, "q_proj" in config.biases)
        self.k_proj = nn.Linear(dims, kv, "k_proj" in config.biases)
        self.v_proj = nn.Linear(dims, kv, "v_proj" in config.biases)
        self.o_proj = nn.Linear(q, dims, "o_proj" in config.biases)
        if config.head_norms:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        if self.turns:
            self.rope = MLXRope(config)
        self.query_scale = config.query_scale

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        q, k, v = (y.swapaxes(1, 2) for y in self.heads(x))
        offset = 0 if cache is None else cache.offset
        q, k = self.turned_queries(q, offset), self.turned_keys(k, offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        mask = self.scores_mask(mask, q, k)
        out = _base.scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    def scores_mask(self, mask: Any, q: mx.array, k: mx.array) -> Any:
        """Return the mask for the attention scores: mlx-lm's `mask`, or for ALiBi the array of the biases
        joined with the causal mask."""
        return mask if self.bias is None else self.bias.mask(q.shape[-2], k.shape[-2], q.dtype)

    def heads(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return q [B, T, H, d], k and v [B, T, K, d] of x [B, T, D], before RoPE."""
        return self.split(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def rows(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return q, k and v as in `heads`, but with all heads of a token in one row: q [B, T, H * d], k and v
        [B, T, K * d]."""
        if "q_norm" not in self:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.reshape(*x.shape[:-1], -1) for y in self.heads(x))
        return q, k, v

    def rows_for_kernels(self, x: mx.array, offsets: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the result of `rows` for kernels that rotate (apply RoPE to) whole heads. If RoPE rotates
        only a part of each head, q and k in the result are already rotated, so that the kernels need not
        rotate them. x: [B, 1, D]; offsets: [B], the position of each sequence's token."""
        if self.kernels_turn or not self.turns:
            return self.rows(x)
        q, k, v = (y.swapaxes(1, 2) for y in self.heads(x))
        turned = self.rope(q, offsets), self.rope(k, offsets), v
        q, k, v = (y.swapaxes(1, 2).reshape(*x.shape[:-1], -1) for y in turned)
        return q, k, v

    def split(self, q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the outputs q, k and v of the three projections, [..., T, H * d], as heads [..., T, H, d].
        Apply the norms of q and k if the layer has norms."""
        q, k, v = (y.reshape(*y.shape[:-1], -1, self.head_dim) for y in (q, k, v))
        return (self.q_norm(q), self.k_norm(k), v) if "q_norm" in self else (q, k, v)

    def turned_queries(self, q: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Return the queries after RoPE (if the layer has RoPE) and after the scaling by position (if the
        model has it). q: [B, H, T, d]. offset: one offset for all sequences, or [B]."""
        q = self.rope(q, offset) if self.turns else q
        if self.query_scale is None:
            return q
        return (q * query_scales(self.query_scale, offset, q.shape[-2])).astype(q.dtype)

    def turned_keys(self, k: mx.array, offset: int | mx.array = 0) -> mx.array:
        return self.rope(k, offset) if self.turns else k
