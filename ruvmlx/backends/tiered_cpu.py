"""Attention over the tiers on the CPU, float32, in few MLX operations, for `cpu_layers`.

A token takes scores and values straight from the codes: q . (s n + b) = s (q . n) + b sum(q), so scales and
biases meet tokens, not numbers, and a byte's two nibbles are two products. A chunk unpacks one layer and is
plain attention then. Twins: kernels/metal/decode.py and gather.py.

n pages; K key/value heads, G query heads to each; D numbers a head.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from ..kernels.metal.decode import gathered, visible
from ..kernels.metal.demote import rotate
from ..kernels.metal.pages import COLD, HOT, PAGE, WARM, Pools, View
from . import cpu_layers
from .mx import mx


class Block(NamedTuple):
    """K or V of some pages: sum of numbers[i] * scale + bias."""

    numbers: list[mx.array]  # float32 [n, K, 64, D], or two of D / 2: the even ones and the odd ones
    scale: mx.array | None = None  # float32 [n, K, 1, 64]
    bias: mx.array | None = None

    def scores(self, q: mx.array) -> mx.array:
        """q [K, G, D] -> [n, K, G, 64]"""
        step = len(self.numbers)
        x = q[..., ::step] @ self.numbers[0].swapaxes(2, 3)
        if step == 2:
            x = x + q[..., 1::2] @ self.numbers[1].swapaxes(2, 3)
        if self.scale is not None:
            x = x * self.scale
        return x if self.bias is None else x + q.sum(axis=-1, keepdims=True) * self.bias

    def mixed(self, p: mx.array) -> mx.array:
        """p [n, K, G, 64] -> [K, G, D]"""
        scaled = p if self.scale is None else p * self.scale
        out = mx.stack([(scaled @ numbers).sum(axis=0) for numbers in self.numbers], axis=-1)
        out = out.reshape(*out.shape[:2], -1)
        return out if self.bias is None else out + (p * self.bias).sum(axis=(0, 3))[..., None]


class Token:
    """One new token, already in its page; made once a step for all layers."""

    def __init__(self, view: View, head_dim: int):
        self._parts = [(tier, mx.array(ids), len(ids)) for tier, _, ids in visible(view)]
        first, pages = view.first // PAGE * PAGE, sum(n for *_, n in self._parts)
        position = np.arange(first, first + PAGE * pages).reshape(pages, 1, 1, PAGE)
        seen = (position >= view.first) & (position < view.n_tokens)
        self._mask = mx.array(np.where(seen, 0, -np.inf).astype(np.float32))
        self._dim = head_dim

    def attend(self, q: mx.array, pools: Pools, rows: mx.array) -> mx.array:
        """q: [K, G, 1, D], scaled -> the same"""
        q = q[:, :, 0]
        blocks = [self._blocks(pools[tier][ids], tier) for tier, ids, _ in self._parts]
        turned = q @ hadamard(self._dim) if self._parts[0][0] == COLD else q
        scores = [
            k.scores(turned if tier == COLD else q)
            for (k, _), (tier, *_) in zip(blocks, self._parts, strict=True)
        ]
        p, at, out = self._softmax(mx.concatenate(scores)), 0, mx.zeros_like(q)
        for (_, v), (*_, n) in zip(blocks, self._parts, strict=True):
            out = out + v.mixed(p[at : at + n])
            at += n
        return out[:, :, None]

    def _softmax(self, x: mx.array) -> mx.array:
        """Over all pages and their tokens."""
        x = x + self._mask
        e = mx.exp(x - x.max(axis=(0, 3), keepdims=True))
        return e / e.sum(axis=(0, 3), keepdims=True)

    def _blocks(self, pages: mx.array, tier: int) -> tuple[Block, ...]:
        """pages: uint8 [n, K, bytes] -> K, V"""
        d, shape = self._dim, (*pages.shape[:2], PAGE, -1)
        if tier == HOT:
            # Rows past the end are zeros (MLXStorage.make), or tokens that were taken back: no NaN.
            both = pages.view(mx.float16).reshape(*pages.shape[:2], 2, PAGE, d).astype(mx.float32)
            return Block([both[:, :, 0]]), Block([both[:, :, 1]])
        size = PAGE * d // (1 if tier == WARM else 2)
        scales = (
            pages[..., 2 * size :].view(mx.float16).astype(mx.float32).reshape(*pages.shape[:2], -1, 1, PAGE)
        )
        k, v = pages[..., :size], pages[..., size : 2 * size]
        if tier == WARM:
            eight = ([x.view(mx.int8).astype(mx.float32).reshape(shape)] for x in (k, v))
            return tuple(Block(x, scales[:, :, i]) for i, x in enumerate(eight))
        four = ([half.astype(mx.float32).reshape(shape) for half in (x & 15, x >> 4)] for x in (k, v))
        return tuple(Block(x, scales[:, :, 2 * i], scales[:, :, 2 * i + 1]) for i, x in enumerate(four))


class Chunk:
    """n new tokens behind those of `view`; made once a step for all layers."""

    def __init__(self, view: View, n: int, window: int, head_dim: int, positions: cpu_layers.Positions):
        first = max(0, view.n_tokens + 1 - window) if window else 0
        seen = View(view.cold, view.warm, view.hot, view.n_tokens, min(first, view.n_tokens))
        self._parts = list(visible(seen))
        self._old = view.n_tokens - first // PAGE * PAGE
        self._dim, self._n, self._positions = head_dim, n, positions

    def attend(self, q: mx.array, pools: Pools, rows: mx.array) -> mx.array:
        """q: [K, G, n, D], scaled; rows: uint8 [K, 2, n, 2 D], their keys and values -> like q"""
        parts = [self._unpacked(pools[tier], ids, tier) for tier, _, ids in self._parts]
        new = rows.view(mx.float16).astype(mx.float32)
        k, v = (_joined([part[i] for part in parts], self._old, new[:, i]) for i in (0, 1))
        mask = self._positions.mask(self._n, k.shape[1])
        return cpu_layers.attend(q[None], k[None, :, None], v[None, :, None], mask)[0]

    def _unpacked(self, pool: mx.array, ids: list[int], tier: int) -> tuple[mx.array, mx.array]:
        """K, V: float32 [K, tokens, D]"""
        k, v = gathered(pool, ids, tier, self._dim)
        return (k @ hadamard(self._dim) if tier == COLD else k), v


def _joined(parts: list[mx.array], old: int, new: mx.array) -> mx.array:
    """The first `old` tokens of the parts, then the new ones: [K, tokens, D]"""
    return mx.concatenate([mx.concatenate(parts, axis=1)[:, :old], new], axis=1) if parts else new


@cache
def hadamard(head_dim: int) -> mx.array:
    """The matrix of `rotate`, its own inverse."""
    matrix = rotate(mx.eye(head_dim))
    mx.eval(matrix)
    return matrix
