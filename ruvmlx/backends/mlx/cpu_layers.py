"""This module has the attention and the MLP that the MLX backend uses on a CPU. The layers of this module
compute the same results as mlx-lm's layers, up to rounding, with fewer and cheaper MLX operations.

On a CPU stream every MLX operation costs 2-5 us, and MLX's exp computes one number at a time (9 ns each). To
save operations, one matrix product computes q, k and v, and one product computes gate and up, unless their
weights are packed (quantised). In a step of one sequence, RoPE's angles are computed once for all layers. The
attention scale is multiplied into q's weights, or into the weights of q's norm. For large arrays, the
function `exp` below computes exponentials with operations that the compiler vectorised. All arrays are
float32. The tests compare the results with mlx-lm's modules (tests/backends).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...models.config.alibi import alibi_slopes
from ...models.config.model import ModelConfig
from ...models.config.rope import query_scales, rope
from ...platform.mx import mx, nn

LARGE = 8192  # for arrays with at least this number of elements, `exp` below is faster than MLX's exp
HAND_OVER = 4  # the number of layers after which MLX starts to compute the part of the graph that is built
# the approximate number of attention scores (half a megabyte) that `attend` computes at a time
TILE = 1 << 17


def install(graph: nn.Module, config: ModelConfig) -> None:
    """Replace the attention and the gated MLP of every layer of `graph` by the classes of this module. The
    old weights of a layer are freed before the next layer is replaced."""
    shared = Positions(config)
    for layer in graph.model.layers:
        layer.self_attn = CPUAttention(layer.self_attn, shared)
        layer.mlp = CPUMLP(layer.mlp) if config.gated_mlp else layer.mlp
        mx.eval(layer.parameters())


def forward(graph: nn.Module, tokens: mx.array, caches: Sequence, given: mx.array | None = None) -> mx.array:
    """Return hidden states [B, L, D] after the final norm of tokens [B, L]; B or L is 1. given: the input of
    the first layer [B, L, D]; None: the tokens are embedded.

    After every HAND_OVER layers, MLX starts to compute the layers whose graph is built, while Python builds
    the graph of the next layers. This overlap makes a decode step of the starter model a tenth faster.
    """
    h = graph.model.embed_tokens(tokens) if given is None else given
    for i, (layer, cache) in enumerate(zip(graph.model.layers, caches, strict=True), 1):
        h = layer(h, None, cache)
        if i % HAND_OVER == 0:
            mx.async_eval(h)
    return graph.model.norm(h)


class Positions:
    """Positions computes the values that all layers of one step share: RoPE's cosines and sines, the scale of
    each query by its position, the causal mask.

    RoPE turns pair i of a head's numbers at position t by the angle t * f_i (f_i: the pair's frequency).
    Cosines and sines are multiplied by RoPE's factor.
    """

    def __init__(self, config: ModelConfig):
        turn = rope(config)
        self.factor, self.query_scale = turn.factor, config.query_scale
        self.on_cpu = turn.frequencies.astype(np.float32)  # [turned_dims / 2]
        self.head_dim, self.turned_dims = config.head_dim, config.turned_dims
        self.frequencies = mx.array(self.on_cpu)
        self.window = config.sliding_window
        self._angles: tuple = (None, None, None)
        self._mask: tuple = (None, None)
        bias_max = config.alibi_bias_max
        self.slopes = alibi_slopes(config.n_heads, bias_max) if bias_max else None
        self._n_kv_heads = config.n_kv_heads

    def angles(self, offset: int, n: int) -> tuple[mx.array, mx.array]:
        """Return cos [n, 1, 1, r/2] and (-sin, +sin) [n, 1, 2, r/2] of the positions offset ... offset + n -
        1. r: turned_dims, the number of a head's numbers that RoPE rotates."""
        if self._angles[0] != (offset, n):
            t = mx.arange(offset, offset + n, dtype=mx.float32)[:, None, None, None]
            angle = t * self.frequencies
            cos, sin = mx.cos(angle), mx.sin(angle)
            if self.factor != 1:
                cos, sin = self.factor * cos, self.factor * sin
            self._angles = (offset, n), cos, mx.concatenate([-sin, sin], axis=2)
        return self._angles[1], self._angles[2]

    def angles_at(self, offsets: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return the result of `angles` for the positions `offsets`, which need not follow one another."""
        if len(offsets) == 1:
            return self.angles(offsets[0], 1)
        angle = np.asarray(offsets, np.float32)[:, None] * self.on_cpu
        cos, sin = (self.factor * turn(angle)[:, None, None] for turn in (np.cos, np.sin))
        return mx.array(cos), mx.array(np.concatenate([-sin, sin], axis=2))

    def turns(self, at: Sequence[int]) -> np.ndarray:
        """Return float32 [len(at), turned_dims]: for each position in `at`, the cosines of RoPE's angles,
        then the sines."""
        angles = np.asarray(at, np.float32)[:, None] * self.on_cpu
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(self.factor)

    def still(self, at: Sequence[int]) -> np.ndarray:
        """Return float32 [len(at), head_dim], the cosines and sines of zero angles: head_dim / 2 ones, then
        head_dim / 2 zeros. A kernel that receives these cosines (1) and sines (0) leaves the heads
        unrotated."""
        row = np.arange(self.head_dim) < self.head_dim // 2
        return np.tile(row.astype(np.float32), (len(at), 1))

    def turn_part(self, heads: np.ndarray, at: Sequence[int]) -> None:
        """Rotate the first turned_dims numbers of each head by RoPE, in place. heads: float32 [len(at), H,
        d]: H heads of d numbers at each position in `at`."""
        cos, sin = np.split(self.turns(at)[:, None], 2, axis=2)
        n = self.turned_dims // 2
        a, b = heads[..., :n].copy(), heads[..., n : 2 * n].copy()
        heads[..., :n], heads[..., n : 2 * n] = a * cos - b * sin, a * sin + b * cos

    def query_scales(self, at: Sequence[int]) -> np.ndarray | None:
        """Return the scale of the query at each position in `at`, float32 [len(at)]. Return None if the model
        does not scale queries by their position, or if all scales are 1."""
        if self.query_scale is None:
            return None
        scales = query_scales(self.query_scale, np.asarray(at))
        return None if (scales == 1).all() else scales

    def mask(self, n: int, total: int) -> mx.array:
        """Return [n, total]: row i has 0 for each token that the i-th of the last n tokens sees, and -inf for
        each other token. With ALiBi, return [K, G, n, total] for K key/value heads with G query heads each;
        the value is slope * (key - query) in place of 0."""
        if self._mask[0] != (n, total):
            t, s = mx.arange(total - n, total)[:, None], mx.arange(total)[None]
            seen = (s <= t) & (t - s < (self.window or total))
            bias = 0.0 if self.slopes is None else self._by_head(self.slopes) * (s - t)
            self._mask = (n, total), mx.where(seen, bias, -math.inf).astype(mx.float32)
        return self._mask[1]

    def mask_of(self, n: int, total: int) -> mx.array | None:
        """Return `mask`, or None if n = 1 and there is no ALiBi, because the last token sees all tokens that
        the cache returns."""
        return self.mask(n, total) if n > 1 or self.slopes is not None else None

    def _by_head(self, slopes: np.ndarray) -> mx.array:
        return mx.array(slopes.reshape(self._n_kv_heads, -1, 1, 1))


class CPUAttention(nn.Module):
    """A layer that computes softmax(q k^T / sqrt(d)) v with grouped heads: H query heads, K key/value heads,
    G = H / K query heads for each key/value head, d numbers for each head."""

    def __init__(self, attention: nn.Module, positions: Positions):
        super().__init__()
        self.n_heads, self.n_kv_heads = attention.n_heads, attention.n_kv_heads
        self.head_dim, self.scale = attention.head_dim, attention.scale
        # if q and k have norms, q is multiplied by the attention scale after its norm, because the norm would
        # undo an earlier scale
        norms = "q_norm" in attention
        products = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = Joined(products, [1.0 if norms else attention.scale, 1.0, 1.0])
        self._eps = attention.q_norm.eps if norms else 0.0
        self._norm = _joined_norms(attention) if norms else None
        self.turns, self.kernels_turn = attention.turns, attention.kernels_turn
        self.o_proj = attention.o_proj
        self._positions = positions

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        """Return the attention output [1, L, D] of x [1, L, D]. The method makes its own mask from the number
        of keys and ignores the argument `mask`."""
        q, k, v = self._project(x, cache.offset)
        k, v = cache.update_and_fetch(k, v)
        n, total = x.shape[1], k.shape[2]
        out = attend(q, k[:, :, None], v[:, :, None], self._positions.mask_of(n, total))
        return self.o_proj(out.transpose(0, 3, 1, 2, 4).reshape(1, x.shape[1], -1))

    def _project(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array, mx.array]:
        """Return q [1, K, G, L, d] (scaled), k and v [1, K, L, d] of x [1, L, D], after RoPE."""
        angles = self._positions.angles(offset, x.shape[1]) if self.turns else None
        return self._project_rotated(x, angles, range(offset, offset + x.shape[1]))

    def _project_rotated(
        self, x: mx.array, angles: tuple[mx.array, mx.array] | None, at: Sequence[int]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return the result of `_project` for tokens at the positions `at`. angles: RoPE's (cosines, sines)
        for these positions; None: no RoPE."""
        n, h, g, d = x.shape[1], self.n_heads, self.n_kv_heads, self.head_dim
        qkv = self.project_normed(x).reshape(n, h + 2 * g, 2, d // 2)
        qk = qkv[:, : h + g]
        if angles is not None:
            qk = self._turn_first(qk, *angles)
        qk = qk.reshape(n, h + g, d).transpose(1, 0, 2)
        q, v = qk[:h], qkv[:, h + g :].reshape(n, g, d).transpose(1, 0, 2)
        scales = self._positions.query_scales(at)
        if scales is not None:
            q = q * mx.array(scales)[:, None]
        return q.reshape(1, g, h // g, n, d), qk[None, h:], v[None]

    def _turn_first(self, qk: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        """Return qk [n, heads, 2, d/2] with the first turned_dims numbers of each head rotated by RoPE."""
        dims = self._positions.turned_dims
        if dims == self.head_dim:
            return qk * cos + qk[:, :, ::-1] * sin
        flat = qk.reshape(*qk.shape[:2], self.head_dim)
        part = flat[..., :dims].reshape(*qk.shape[:2], 2, dims // 2)
        part = part * cos + part[:, :, ::-1] * sin
        return mx.concatenate([part.reshape(*qk.shape[:2], dims), flat[..., dims:]], axis=-1)

    def project_normed(self, x: mx.array) -> mx.array:
        """Return q (scaled), k and v of x [1, L, D] before RoPE. If the model has norms for heads, the heads
        of q and k in the result are normed.

        The result is one array with q, k and v side by side: [1, L, (H + 2 K) d] or, with norms, [L, H + 2 K,
        d]. The method does not reshape this array, because each MLX operation costs as much as a small
        product.
        """
        if self._norm is None:
            return self.qkv(x)
        qkv = self.qkv(x).reshape(x.shape[1], -1, self.head_dim)
        qk, v = mx.split(qkv, [self.n_heads + self.n_kv_heads], axis=1)
        return mx.concatenate([mx.fast.rms_norm(qk, None, self._eps) * self._norm, v], axis=1)


def _joined_norms(attention: nn.Module) -> mx.array:
    """Return the norm weights of the H query heads and the K key heads in one array [H + K, d]. The query
    heads' weights are multiplied by the attention scale."""
    q = mx.broadcast_to(attention.q_norm.weight * attention.scale, (attention.n_heads, attention.head_dim))
    k = mx.broadcast_to(attention.k_norm.weight, (attention.n_kv_heads, attention.head_dim))
    return mx.concatenate([q, k])


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """Return softmax(q k^T + mask) v [1, K, G, L, d]: q [1, K, G, L, d] (scaled), k and v [1, K, 1, T, d].

    If there is a mask, queries are computed in blocks of about TILE scores, each block only with the keys up
    to the block's last query. With blocks, the attention scores mostly stay in the CPU's cache, and most
    scores that the mask removes are never computed (256 queries over 1,100 keys: 14 ms instead of 37 ms).
    """
    n, total = q.shape[3], k.shape[3]
    rows = max(8, TILE // (q.shape[1] * q.shape[2] * total))
    if mask is None or n <= rows:
        return _attend(q, k, v, mask)
    blocks = []
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        seen = total - n + stop
        part = mask[..., start:stop, :seen]
        blocks.append(_attend(q[..., start:stop, :], k[..., :seen, :], v[..., :seen, :], part))
    return mx.concatenate(blocks, axis=3)


def _attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    scores = q @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = scores + mask
    if scores.size < LARGE:
        return mx.softmax(scores, axis=-1) @ v
    e = exp(scores - scores.max(axis=-1, keepdims=True))
    return (e @ v) / e.sum(axis=-1, keepdims=True)


class CPUMLP(nn.Module):
    """An MLP that computes down(silu(gate(x)) * up(x)), with silu(g) = g / (1 + exp(-g))."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_up = Joined([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = self.gate_up.split(x)
        if gate.size < LARGE:
            return self.down_proj(gate * mx.sigmoid(gate) * up)
        return self.down_proj(gate * up / (1.0 + exp(-gate)))


class Joined(nn.Module):
    """Several linear layers with the same input, computed by one matrix product. If one of the layers has
    packed (quantised) weights, each layer is computed by its own product.

    change: a function of x [..., in] that returns the numbers that a BaseLoRA adds to the outputs, [..., sum
    of widths]; None: no BaseLoRA
    """

    def __init__(self, linears: Sequence[nn.Module], scales: Sequence[float] | None = None):
        super().__init__()
        self.factors = scales = scales or [1.0] * len(linears)
        self.widths = [linear.weight.shape[0] for linear in linears]
        self.change: Callable[[mx.array], mx.array] | None = None
        self.joined = not any(isinstance(linear, nn.QuantizedLinear) for linear in linears)
        if self.joined:
            self.weight = mx.concatenate([m.weight * s for m, s in zip(linears, scales, strict=True)])
            self.bias = _joined_bias(linears, scales, self.weight)
        else:
            self.linears = list(linears)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs of all linear layers for x [1, L, in], side by side: [1, L, sum of widths]."""
        if not self.joined:
            return mx.concatenate(self.split(x), axis=-1)
        y = x @ self.weight.T
        y = y if self.bias is None else y + self.bias
        return y if self.change is None else y + self.change(x)

    def split(self, x: mx.array) -> list[mx.array]:
        """Return the output of each linear layer for x [1, L, in] as an array [1, L, width]. If L > 1,
        compute one product for each linear layer, so that each array is contiguous."""
        stops = [sum(self.widths[: i + 1]) for i in range(len(self.widths) - 1)]
        if self.joined and x.shape[1] == 1:
            return list(mx.split(self(x), stops, axis=-1))
        parts = self._parts(x, stops)
        if self.change is None:
            return parts
        return [y + d for y, d in zip(parts, mx.split(self.change(x), stops, axis=-1), strict=True)]

    def _parts(self, x: mx.array, stops: list[int]) -> list[mx.array]:
        """Return the output of each linear layer for x, without a BaseLoRA's change, by one product for
        each."""
        if not self.joined:
            return [m(x) * s if s != 1.0 else m(x) for m, s in zip(self.linears, self.factors, strict=True)]
        parts = [x @ w.T for w in mx.split(self.weight, stops)]
        if self.bias is None:
            return parts
        return [y + b for y, b in zip(parts, mx.split(self.bias, stops), strict=True)]


def _joined_bias(linears: Sequence[nn.Module], scales: Sequence[float], weight: mx.array) -> mx.array | None:
    if not any("bias" in m for m in linears):
        return None
    zero = [mx.zeros((m.weight.shape[0],), weight.dtype) for m in linears]
    return mx.concatenate([m.get("bias", z) * s for m, z, s in zip(linears, zero, scales, strict=True)])


# The coefficients of a polynomial for 2^f on [-1/2, 1/2], lowest power first. The relative error is at most
# 8e-8.
POWERS = (
    1.0000000716546569,
    0.6931469670638644,
    0.2402211972393381,
    0.05550713274960451,
    0.00967554133068596,
    0.0013276471519801762,
)


def exp(x: mx.array) -> mx.array:
    """Return e^x in float32, with a relative error under (3 + |x|) * 1e-7 for -87 <= x <= 88. For x outside
    the range from -87 to 88, return e^x of the nearer bound.

    The function splits x / ln 2 into n + f with a whole number n, so that e^x = 2^n * 2^f. The addition of
    1.5 * 2^23 to x / ln 2 leaves n in the low bits of the float. A shift by 23 bits moves n into the exponent
    of 2^f.
    """
    t = mx.clip(x, -87.0, 88.0) * (1.0 / math.log(2.0))
    shifted = t + 12582912.0
    f = t - (shifted - 12582912.0)
    p = POWERS[-1] * f + POWERS[-2]
    for c in reversed(POWERS[:-2]):
        p = p * f + c
    return (p.view(mx.int32) + (shifted.view(mx.int32) << 23)).view(mx.float32)
