"""Attention of a chunk of new tokens over older tiers and, causally, over itself.

Tile by tile, on the GPU and in the twin: neither ever holds an unpacked copy of the cache.
"""

from dataclasses import dataclass

import numpy as np

from ruvmlx.backends.mx import mx

from . import pages
from .decode import for_cold, gathered
from .pages import Pools, Table, View
from .source import Kernel, on_gpu

PREFILL = Kernel(
    "attend_prefill",
    (
        ("q", "float"),
        ("q_cold", "float"),
        ("params", "int"),
        ("pages", "int"),
        ("cold", "uchar"),
        ("warm", "uchar"),
        ("hot", "uchar"),
        ("fresh", "uchar"),
    ),
    (("o", "float"),),
    ("D",),
    threads=128,
    headers=("pages.h", "tile.h"),
)
ROWS = 32  # (query, head) pairs to a threadgroup
TWIN_PAGES = 8  # that the twin unpacks at a time


@dataclass(frozen=True)
class Chunk:
    """T new tokens of one sequence, after those of `table`'s only view.  Made once a step, for all layers."""

    table: Table
    tokens: int
    window: int = 0  # tokens that a query sees at most, itself included; 0: all

    def params(self) -> mx.array:
        row = np.array(self.table.params)[0]
        row[10], row[11] = self.tokens, self.window
        return mx.array(row)


def chunk(view: View, tokens: int, n_heads: int, n_kv_heads: int, head_dim: int, window: int = 0) -> Chunk:
    return Chunk(Table([view], n_heads, n_kv_heads, head_dim), tokens, window)


def attend(q: mx.array, pools: Pools, fresh: mx.array, new: Chunk) -> mx.array:
    """q: [T, n_heads, D]; fresh: append's rows, uint8 [n_kv_heads, 2, T, 2 * D] -> [T, n_heads, D]"""
    wide = q.astype(mx.float32)
    run = attend_prefill_gpu if on_gpu(new.table.head_dim) else attend_prefill_ops
    return run(wide, for_cold(wide, new.table), pools, fresh, new).astype(q.dtype)


def attend_prefill_gpu(
    q: mx.array, q_cold: mx.array, pools: Pools, fresh: mx.array, new: Chunk, run=Kernel.__call__
) -> mx.array:
    table, (tokens, heads, dim) = new.table, q.shape
    groups = (-(-tokens * (heads // table.n_kv_heads) // ROWS), table.n_kv_heads, 1)
    inputs = [q, q_cold, new.params(), table.pages, *pools, fresh]
    return run(PREFILL, inputs, [q.shape], groups, (dim,))[0]


def attend_prefill_ops(q: mx.array, q_cold: mx.array, pools: Pools, fresh: mx.array, new: Chunk) -> mx.array:
    """The twin: an online softmax over TWIN_PAGES pages at a time."""
    n_kv, dim = new.table.n_kv_heads, new.table.head_dim
    old = new.table.views[0].n_tokens
    position = old + mx.arange(new.tokens)[:, None]
    q, q_cold = (_heads_first(x, n_kv) * dim**-0.5 for x in (q, q_cold))
    m = mx.full((*q.shape[:-1], 1), -mx.inf)
    total, o = mx.zeros_like(m), mx.zeros_like(q)
    for start, stop, cold, k, v in _parts(pools, fresh, new):
        token = mx.arange(start, start + k.shape[1])
        seen = (token < stop) & (token <= position)
        if new.window:
            seen = seen & (token > position - new.window)
        x = (q_cold if cold else q) @ k[:, None].swapaxes(-1, -2)  # [n_kv, G, T, tokens]
        x = mx.where(seen, x, -mx.inf)
        m_new = mx.maximum(m, x.max(axis=-1, keepdims=True))
        at = mx.where(m_new == -mx.inf, 0, m_new)
        p, shrink = mx.exp(x - at), mx.exp(m - at)
        total = total * shrink + p.sum(axis=-1, keepdims=True)
        o = o * shrink + p @ mx.where((token < stop)[:, None], v, 0)[:, None]
        m = m_new
        mx.eval(m, total, o)
    return (o / total).transpose(2, 0, 1, 3).reshape(new.tokens, -1, dim)


def _heads_first(q: mx.array, n_kv: int) -> mx.array:
    """[T, n_heads, D] -> [n_kv, G, T, D]"""
    tokens, heads, dim = q.shape
    return q.reshape(tokens, n_kv, heads // n_kv, dim).transpose(1, 2, 0, 3)


def _parts(pools: Pools, fresh: mx.array, new: Chunk):
    """(first token, end of the real ones, is it cold, K, V) of a few pages, oldest first; then the chunk."""
    view, start = new.table.views[0], 0
    oldest = max(view.n_tokens - new.window + 1, 0) if new.window else 0
    for tier, ids in ((pages.COLD, view.cold), (pages.WARM, view.warm), (pages.HOT, view.hot)):
        for i in range(0, len(ids), TWIN_PAGES):
            some = list(ids)[i : i + TWIN_PAGES]
            gone = min(max(oldest // pages.PAGE - start // pages.PAGE, 0), len(some))
            if gone < len(some):
                k, v = gathered(pools[tier], some[gone:], tier, new.table.head_dim)
                yield start + gone * pages.PAGE, view.n_tokens, tier == pages.COLD, k, v
            start += len(some) * pages.PAGE
    rows = fresh.view(mx.float16).astype(mx.float32)  # [n_kv, 2, T, D]
    yield view.n_tokens, view.n_tokens + new.tokens, False, rows[:, 0], rows[:, 1]
