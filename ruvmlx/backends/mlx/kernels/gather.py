"""This module computes the attention of a prompt's new tokens over the older KV pages and, with a causal
mask, over the new tokens themselves.

The kernel dequantises older pages into the same array as the new rows, a few KV heads at a time. MLX's own
fused attention, which uses the GPU's matrix units, then computes the attention over the array of all keys and
values. If there are no older pages, the attention uses the new rows directly.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from ruvmlx.platform.mx import mx
from ruvmlx.tiers import PAGE, TIERS

from .demote import rotate
from .pages import POOLS, GPUPageTable, KernelParam, Pools, SequencePages, unpack
from .source import HEAD_DIMS, Kernel

GATHER = Kernel(
    "gather",
    (
        ("params", "int"),
        ("pages", "int"),
        *POOLS,
        ("fresh", "uchar"),
    ),
    (("out", "uint"),),
    ("D",),
    threads=128,
    headers=("pages.h", "quantise.h"),
    values=tuple(product(HEAD_DIMS)),
)
BLOCK = 64 << 20  # the maximum number of bytes of keys and values that are dequantised at a time


@dataclass(frozen=True)
class PromptChunk:
    """The n new tokens of one sequence. The new tokens come after the tokens of the only view in `table`. One
    object serves all layers of a step."""

    table: GPUPageTable
    tokens: int
    window: int = 0  # the number of tokens that a query sees, itself included; 0: all tokens

    @cached_property
    def first(self) -> int:
        """Return the index of the first token to gather: the first token of the page with the oldest token
        that any new token sees."""
        view = self.table.views[0]
        oldest = max(view.first, view.n_tokens - self.window + 1 if self.window else 0)
        return min(max(oldest, 0), view.n_tokens) // PAGE * PAGE

    @cached_property
    def total(self) -> int:
        """Return the number of keys of one head: the gathered keys and the keys of the new tokens."""
        return self.table.views[0].n_tokens - self.first + self.tokens

    @cached_property
    def heads(self) -> int:
        """Return the number of KV heads to process at a time. The keys and values of these heads take at most
        BLOCK bytes in f16, unless one head alone takes more. With ALiBi, the bytes include the bytes of the
        masks in f32."""
        mask = 0 if self.table.slopes is None else self.group * self.tokens
        return max(1, min(self.table.n_kv_heads, BLOCK // (4 * (self.table.head_dim + mask) * self.total)))

    @property
    def group(self) -> int:
        """Return the number of query heads of a KV head."""
        return self.table.n_heads // self.table.n_kv_heads

    @cached_property
    def mask(self) -> mx.array | str:
        """Return the mask: bool [tokens, total], or "causal", MLX's name for the mask in which a token sees
        itself and all tokens before it."""
        if not self.window or self.total <= self.window:
            return "causal"
        return self._visible(self._distances())

    def biased_mask(self, head: int, n: int) -> mx.array:
        """Return ALiBi's bias of n query heads, from the head `head` on: float32 [n, tokens, total]; -inf for
        keys that a token does not see."""
        away = self._distances()
        slopes = self.table.slopes_of(head, n)[:, None, None]
        return mx.where(self._visible(away), slopes * away, -mx.inf)

    def _distances(self) -> mx.array:
        """Return the position of each key minus the position of each new token: int32 [tokens, total]."""
        return mx.arange(self.total)[None] - mx.arange(self.total - self.tokens, self.total)[:, None]

    def _visible(self, away: mx.array) -> mx.array:
        return (away <= 0) & (away > -self.window) if self.window else away <= 0

    def params(self, head: int) -> mx.array:
        """Return the kernel parameters for the KV heads from `head` on."""
        return self._params[head]

    @cached_property
    def _params(self) -> dict[int, mx.array]:
        found = {}
        for head in range(0, self.table.n_kv_heads, self.heads):
            row = self.table.rows[0].copy()
            row[KernelParam.FIRST], row[KernelParam.N_NEW] = self.first, self.tokens
            row[KernelParam.HEAD], row[KernelParam.HEADS] = (
                head,
                min(self.heads, self.table.n_kv_heads - head),
            )
            found[head] = mx.array(row)
        return found


def chunk(
    view: SequencePages,
    tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    window: int = 0,
    slopes: np.ndarray | None = None,
) -> PromptChunk:
    return PromptChunk(GPUPageTable([view], n_heads, n_kv_heads, head_dim, slopes=slopes), tokens, window)


def attend(q: mx.array, pools: Pools, fresh: mx.array, new: PromptChunk) -> mx.array:
    """Return the attention output, in the shape of q. q: [1, n_heads, n, D], the queries after RoPE. fresh:
    rows from `append`, uint8 [n_kv_heads, 2, n, 2 * D].

    16-bit queries are converted to float16, the cache's type. A conversion of the keys to bfloat16 would lose
    three of their 11 significant bits.
    """
    kind = mx.float32 if q.dtype == mx.float32 else mx.float16
    wide, scale = q.astype(kind), new.table.head_dim**-0.5
    parts = []
    for head in range(0, new.table.n_kv_heads, new.heads):
        k, v = (x[None].astype(kind) for x in keys_and_values(pools, fresh, new, head))
        first, n = head * new.group, k.shape[1] * new.group
        some = wide[:, first : first + n]
        mask = new.mask if new.table.slopes is None else new.biased_mask(first, n).astype(kind)
        parts.append(mx.fast.scaled_dot_product_attention(some, k, v, scale=scale, mask=mask))
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
    return out.astype(q.dtype)


def keys_and_values(
    pools: Pools, fresh: mx.array, new: PromptChunk, head: int = 0
) -> tuple[mx.array, mx.array]:
    """Return K and V: float16 [heads, total, D] of the KV heads from `head` on."""
    if new.total == new.tokens:
        rows = fresh[head : head + new.heads].view(mx.float16)
        return rows[:, 0], rows[:, 1]
    run = gather_gpu if new.table.on_gpu else gather_ops
    both = run(pools, fresh, new, head)
    return both[0], both[1]


def gather_gpu(pools: Pools, fresh: mx.array, new: PromptChunk, head: int, run=Kernel.__call__) -> mx.array:
    """Return K and V, float16 [2, heads, total, D], from the GPU kernel."""
    dim, heads = new.table.head_dim, min(new.heads, new.table.n_kv_heads - head)
    old = -(-new.table.views[0].n_tokens // PAGE) - new.first // PAGE
    groups = (old + -(-new.tokens // PAGE), heads, 1)
    inputs = [new.params(head), new.table.pages, *pools, fresh]
    words = run(GATHER, inputs, [(2, heads, new.total, dim // 2)], groups, (dim,))[0]
    return words.view(mx.float16) if isinstance(words, mx.array) else words.view(np.float16)


def gather_ops(pools: Pools, fresh: mx.array, new: PromptChunk, head: int) -> mx.array:
    """Return the result of `gather_gpu`, computed in plain MLX (the twin)."""
    view, dim, parts = new.table.views[0], new.table.head_dim, []
    here = slice(head, min(head + new.heads, new.table.n_kv_heads))
    for tier, _, ids in replace(view, first=new.first).visible():
        k, v = unpack(pools[tier][mx.array(ids)][:, here], tier, dim)  # [n, heads, 64, D]
        both = mx.stack([rotate(k) if TIERS[tier].rotated else k, v]).astype(mx.float16)
        parts.append(both.swapaxes(1, 2).reshape(2, both.shape[2], -1, dim))
    old = [mx.concatenate(parts, axis=2)[:, :, : new.total - new.tokens]] if parts else []
    return mx.concatenate([*old, fresh[here].view(mx.float16).swapaxes(0, 1)], axis=2)
