"""Caches of one head that share pages, and attention over them: in one call of the kernel, and one by one in
float64.

first = SharedKV.of(300, 64)                         # 300 random tokens, dimensions of a head: 64
caches = [first, first.fork(), first.fork().fork()]  # a page that is not full is copied
for i, cache in enumerate(caches):
    cache.extend(9, seed=i)
demote(caches, {0: COLD, 1: WARM})                   # page -> tier; a shared page stays shared
attend_rows(caches, q)                               # q: [caches, group, 64]
attend_rows_ref(caches, q)
"""

import ctypes as C
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ruvmlx.kernels import layers
from ruvmlx.kernels.decoder import ROW
from ruvmlx.kernels.layers import Array, PagedKV
from ruvmlx.kernels.library import _load
from ruvmlx.tiers import COLD, HOT, PAGE
from tests.oracles import pages as p


def turns(tokens: int, head_dim: int) -> Array:
    return layers.turns(np.arange(tokens), 10000.0 ** (-np.arange(head_dim // 2) * 2 / head_dim))


class SharedKV:
    """kv: the pages. keys (turned), values: [tokens, head_dim], the numbers that they hold."""

    def __init__(self, kv: PagedKV, keys: Array, values: Array):
        self.kv, self.keys, self.values = kv, keys, values

    @classmethod
    def of(cls, tokens: int, head_dim: int) -> "SharedKV":
        nothing = np.zeros((0, head_dim), np.float32)
        cache = cls(PagedKV(head_dim), nothing, nothing)
        cache.extend(tokens, seed=99)
        return cache

    def fork(self) -> "SharedKV":
        kv = PagedKV(self.kv.head_dim, list(self.kv.pages), list(self.kv.tiers), self.kv.tokens)
        if kv.tokens % PAGE:
            kv.pages[-1] = kv.pages[-1].copy()
        return SharedKV(kv, self.keys.copy(), self.values.copy())

    def extend(self, tokens: int, seed: int, impl: str | None = None) -> None:
        start, head_dim = self.kv.tokens, self.kv.head_dim
        k, v = np.random.default_rng(seed).normal(size=(2, tokens, head_dim)).astype(np.float32)
        turn = np.ascontiguousarray(turns(start + tokens, head_dim)[start:])
        self.kv.append(k, v, turn, impl)
        turned = layers.rope_ref(k[:, None], turn)[:, 0]
        self.keys = np.concatenate([self.keys, turned.astype(np.float16).astype(np.float32)])
        self.values = np.concatenate([self.values, v.astype(np.float16).astype(np.float32)])

    def place(self, index: int, tier: int, page: NDArray[np.uint8]) -> None:
        """A demoted page instead of the hot one."""
        self.kv.pages[index], self.kv.tiers[index] = page, tier
        at, head_dim = slice(index * PAGE, (index + 1) * PAGE), self.kv.head_dim
        keys, self.values[at] = p.numbers_ref(tier, p.canonical(tier, page, head_dim), head_dim)
        self.keys[at] = p.rotate_ref(keys) if tier == COLD else keys  # rotating twice is nothing


def demote(caches: Sequence[SharedKV], tiers: Mapping[int, int]) -> None:
    for index, tier in tiers.items():
        made: dict[int, NDArray[np.uint8]] = {}
        for cache in caches:
            hot = cache.kv.pages[index]
            assert cache.kv.tiers[index] == HOT
            if id(hot) not in made:
                made[id(hot)] = p.demote(HOT, hot.view(np.uint8)[None], tier, cache.kv.head_dim)[0]
        for cache in caches:
            cache.place(index, tier, made[id(cache.kv.pages[index])])


def attend_rows(
    caches: Sequence[SharedKV],
    q: Array,
    window: int = 0,
    parts: int = 1,
    impl: str | None = None,
    matmul: str | None = None,
) -> Array:
    """softmax(q . k / sqrt(d)) v of the newest token of each cache, in one call of the kernel for each of
    `parts` key ranges: [caches, group, d]."""
    count, group, head_dim = q.shape
    f, tokens = layers.functions(impl), caches[0].kv.tokens
    assert all(cache.kv.tokens == tokens for cache in caches)
    tables = [
        (layers._Page * len(c.kv.pages))(
            *(layers._Page(page.ctypes.data, tier) for page, tier in zip(c.kv.pages, c.kv.tiers, strict=True))
        )
        for c in caches
    ]
    rows = np.array([(C.addressof(table), tokens - 1, 0) for table in tables], ROW)
    out, stop, row = np.empty_like(q), len(tables[0]), count * group * (head_dim + 2)
    partial = np.empty((parts, row), np.float32)
    scratch = np.empty(f.scratch(count * group, head_dim), np.float32)
    turn = np.tile(turns(tokens, head_dim)[-1], (count, 1))
    kernels = C.cast(_load().rvm_matmul_impl(matmul.encode() if matmul else None), C.c_void_p)
    call = layers._Attention(C.addressof(tables[0]), rows.ctypes.data, 0, kernels, head_dim, group)
    call.q, call.q_stride, call.turn = q.ctypes.data, group * head_dim, turn.ctypes.data
    call.queries, call.position, call.window = count, tokens - 1, window
    call.out, call.out_stride, call.scratch = out.ctypes.data, group * head_dim, scratch.ctypes.data
    first = max(0, tokens - window) // PAGE if window else 0
    for i in range(parts):
        call.first_page = first + i * (stop - first) // parts
        call.end_page = first + (i + 1) * (stop - first) // parts
        call.partial = partial[i].ctypes.data if parts > 1 else None
        assert f.attend(C.addressof(call)) == 0
    if parts > 1:
        assert f.merge(partial.ctypes.data, parts, row, count * group, head_dim, out.ctypes.data) == 0
    return out


def attend_rows_ref(caches: Sequence[SharedKV], q: Array, window: int = 0) -> NDArray[np.float64]:
    """The same, each cache by itself, over all numbers that its pages hold."""
    out = np.empty(q.shape, np.float64)
    for row, cache in enumerate(caches):
        tokens, head_dim = cache.keys.shape
        turn = turns(tokens, head_dim)[-1:]
        seen = slice(max(0, tokens - window) if window else 0, tokens)
        keys, values = cache.keys[seen].astype(np.float64), cache.values[seen].astype(np.float64)
        for head in range(q.shape[1]):
            query = layers.rope_ref(q[row : row + 1, head : head + 1], turn)[0, 0].astype(np.float64)
            scores = keys @ query / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values / weights.sum()
    return out
