"""KV pages as the kernels see them; bit layouts in metal_kernels/README.md.

A page is 64 tokens of one layer and one KV head. A pool is uint8 [pages, n_kv_heads, bytes of a page].
Tiers are numbered as in pages.h: COLD 0, WARM 1, HOT 2.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ruvmlx.platform.mx import mx

from .source import on_gpu

PAGE = 64  # tokens
COLD, WARM, HOT = 0, 1, 2
PARAMS = 16
COST = 1, 3, 6  # of a page, by tier, as in pages.h
MAX_SHARED = 8  # query heads that one threadgroup serves
THREADGROUPS, LEAST_SPLIT = 320, 12
Pools = Sequence[mx.array]  # [COLD], [WARM], [HOT]; an empty tier may be any array of at least 8 bytes


def page_bytes(tier: int, head_dim: int) -> int:
    return (64 * head_dim + 512, 128 * head_dim + 256, 256 * head_dim)[tier]


@dataclass(frozen=True)
class SequencePages:
    """The pages of one sequence, the same in every layer, oldest tokens first: cold ids, then warm, then hot.

    All pages but the last are full; the last is hot and holds the rest of n_tokens. Tokens before `first` are
    not read; pages that hold only such tokens may be gone (any id will do).
    """

    cold: Sequence[int]
    warm: Sequence[int]
    hot: Sequence[int]
    n_tokens: int
    first: int = 0

    def ids(self) -> list[int]:
        return [*self.cold, *self.warm, *self.hot]

    @property
    def visible_cost(self) -> int:
        """Cost of attention over the visible pages, in units of one cold page."""
        return self._cost_before(len(self.ids())) - self._cost_before(self.first // PAGE)

    def _cost_before(self, page: int) -> int:
        cold, warm = len(self.cold), len(self.warm)
        n = min(page, cold), min(max(page - cold, 0), warm), max(page - cold - warm, 0)
        return sum(a * b for a, b in zip(COST, n, strict=True))


def check(view: SequencePages) -> SequencePages:
    n, full = len(view.ids()), (len(view.cold) + len(view.warm)) * PAGE
    if not (n - 1) * PAGE < view.n_tokens <= n * PAGE and n + view.n_tokens:
        raise ValueError(f"{view.n_tokens} tokens do not fit {n} pages of {PAGE}")
    if view.n_tokens < full:
        raise ValueError(f"{view.n_tokens} tokens leave a warm or cold page partly filled ({full} tokens)")
    if not 0 <= view.first <= view.n_tokens:
        raise ValueError(f"first visible token {view.first} of {view.n_tokens}")
    return view


class GPUPageTable:
    """The pages of several sequences (`views`) in the kernels' format, made once a step for all layers.

    split: work of one threadgroup, in cold pages. A larger split leaves fewer parts to merge, a smaller one
    keeps more threadgroups busy. The default makes about THREADGROUPS of them.
    """

    def __init__(
        self, views: Sequence[SequencePages], n_heads: int, n_kv_heads: int, head_dim: int, split: int = 0
    ):
        self.views = [check(view) for view in views]
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.on_gpu = on_gpu(head_dim)  # asked once a step, not three times a layer
        self.shared = shared_heads(n_heads // n_kv_heads, head_dim)
        costs = [view.visible_cost for view in self.views]
        split = split or max(LEAST_SPLIT, -(-sum(costs) * n_heads // self.shared // THREADGROUPS))
        self.splits = max(1, *(-(-cost // split) for cost in costs))
        rows: list[list[int]] = []
        ids: list[int] = []
        for view in self.views:
            rows.append(self._row(view, len(ids), split))
            ids += view.ids()
        self.rows = np.array(rows, np.int32)
        self.params = mx.array(self.rows)
        self.pages = mx.array(np.array(ids + [0] * 8, np.int32))

    def _row(self, view: SequencePages, at: int, split: int) -> list[int]:
        tiers = [len(view.cold), len(view.warm), len(view.hot)]
        scale = struct.unpack("i", struct.pack("f", softmax_scale(self.head_dim)))[0]
        row = [
            *tiers,
            view.n_tokens,
            view.first,
            at,
            split,
            self.n_kv_heads,
            self.n_heads // self.n_kv_heads,
            scale,
        ]
        return [*row, 0, 0, self.splits, 0, 0, 0]


def softmax_scale(head_dim: int) -> float:
    """log2(e) / sqrt(head_dim): the kernels' exponentials are powers of two."""
    return math.log2(math.e) / math.sqrt(head_dim)


def shared_heads(group: int, head_dim: int) -> int:
    """Query heads to a threadgroup: all of a group, or its largest divisor within MAX_SHARED.

    Within half of that for heads of 256: eight would need more than 32 KB of threadgroup memory.
    """
    most = MAX_SHARED if head_dim <= 128 else MAX_SHARED // 2
    return max(n for n in range(1, most + 1) if group % n == 0)


def unpack(pages: mx.array, tier: int, head_dim: int) -> tuple[mx.array, mx.array]:
    """pages: uint8 [..., bytes] -> K, V: float32 [..., 64, head_dim]; cold K rotated, as it is stored."""
    d, flat = head_dim, pages.shape[:-1]
    if tier == HOT:
        both = pages.view(mx.float16).astype(mx.float32).reshape(*flat, 2, PAGE, d)
        return both[..., 0, :, :], both[..., 1, :, :]
    if tier == WARM:
        n = PAGE * d
        k, v = (pages[..., i * n : i * n + n].view(mx.int8).astype(mx.float32) for i in (0, 1))
        scales = _halves(pages, 2 * n, 2 * PAGE).reshape(*flat, 2, PAGE, 1)
        k, v = k.reshape(*flat, PAGE, d), v.reshape(*flat, PAGE, d)
        return k * scales[..., 0, :, :], v * scales[..., 1, :, :]
    n = PAGE * d // 2
    k, v = (_nibbles(pages[..., i * n : i * n + n]).reshape(*flat, PAGE, d) for i in (0, 1))
    ks, kb, vs, vb = mx.split(_halves(pages, 2 * n, 4 * PAGE)[..., None], 4, axis=-2)
    return k * ks + kb, v * vs + vb


def _halves(pages: mx.array, start: int, n: int) -> mx.array:
    return pages[..., start : start + 2 * n].view(mx.float16).astype(mx.float32)


def _nibbles(packed: mx.array) -> mx.array:
    """[..., n] bytes -> [..., 2n] numbers, the low nibble first."""
    both = mx.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1).astype(mx.float32)
