"""This module describes KV pages in the form that the GPU kernels (Metal and CUDA) read.
metal_kernels/README.md has the bit layouts.

In this package, a page is 64 tokens of one layer and one KV head. A pool is uint8 [pages, n_kv_heads,
bytes of a page].
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import accumulate

import numpy as np

from ruvmlx.platform.mx import mx
from ruvmlx.tiers import HOT, PAGE, TIERS, Tier

from .source import on_gpu

PARAMS = 16
MAX_SHARED = 8  # the maximum number of query heads of one threadgroup
THREADGROUPS, LEAST_SPLIT = 320, 12
Pools = Sequence[mx.array]  # the pools by tier; for an empty tier, any array of at least 8 bytes
POOLS = tuple((tier.name, "uchar") for tier in TIERS)  # the kernels' arguments for the pools


class KernelParam(IntEnum):
    """The index of each kernel parameter, as in pages.h. The parameters before the first index of this class
    are the numbers of pages in each tier."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return len(TIERS) + count

    N_TOKENS = auto()
    FIRST = auto()
    TABLE = auto()
    SPLIT = auto()
    KV_HEADS = auto()
    GROUP = auto()
    SCALE = auto()
    N_NEW = auto()
    SPLITS = auto()
    HEAD = auto()
    HEADS = auto()


def params_of(**values: int) -> list[int]:
    """Return a row of parameters from their names. All other parameters are 0."""
    row = [0] * PARAMS
    for name, value in values.items():
        row[KernelParam[name]] = value
    return row


def has_bias(tier: Tier) -> bool:
    """Return True if the tier has a bias as well as a scale. Only 4-bit codes have a bias."""
    return tier.bits == 4


def page_bytes(tier: int, head_dim: int) -> int:
    row = TIERS[tier]
    scales = 0 if row.bits == 16 else 512 if has_bias(row) else 256
    return 16 * row.bits * head_dim + scales


@dataclass(frozen=True)
class SequencePages:
    """The pages of one sequence, the same in every layer.

    by_tier: the page ids of each tier; the lowest tier holds the oldest tokens
    n_tokens: the number of tokens; all pages except the last are full, and the last is hot
    first: the first token that attention reads; a page with only earlier tokens can be missing; the page id
        of a missing page has no meaning
    """

    by_tier: Sequence[Sequence[int]]
    n_tokens: int
    first: int = 0

    def ids(self) -> list[int]:
        return [page for ids in self.by_tier for page in ids]

    def counts(self) -> list[int]:
        return [len(ids) for ids in self.by_tier]

    @property
    def visible_cost(self) -> int:
        """The cost of attention over the visible pages, in units of one cold page."""
        return self._cost_before(len(self.ids())) - self._cost_before(self.first // PAGE)

    def _cost_before(self, page: int) -> int:
        cost = 0
        for tier, n in zip(TIERS, self.counts(), strict=True):
            here = min(page, n)
            cost, page = cost + tier.cost * here, page - here
        return cost

    def visible(self) -> list[tuple[int, int, list[int]]]:
        """Return (tier, first token, page ids) of each tier with a page that attention reads, the oldest
        tokens first."""
        skip, starts = self.first // PAGE, accumulate(self.counts(), initial=0)
        found = []
        for tier, (start, ids) in enumerate(zip(starts, self.by_tier, strict=False)):
            here = list(ids)[max(skip - start, 0) :]
            if here:
                found.append((tier, (start + len(ids) - len(here)) * PAGE, here))
        return found


def check(view: SequencePages) -> SequencePages:
    n, full = len(view.ids()), sum(view.counts()[:HOT]) * PAGE
    if not (n - 1) * PAGE < view.n_tokens <= n * PAGE and n + view.n_tokens:
        raise ValueError(f"{view.n_tokens} tokens do not fit {n} pages of {PAGE}")
    if view.n_tokens < full:
        raise ValueError(f"{view.n_tokens} tokens leave a page that is not hot partly filled ({full} tokens)")
    if not 0 <= view.first <= view.n_tokens:
        raise ValueError(f"first visible token {view.first} of {view.n_tokens}")
    return view


class GPUPageTable:
    """The pages of several sequences (`views`) in the kernels' format. One table serves all layers of a step.

    split: the amount of work of one threadgroup, counted in cold pages. With a larger split, fewer partial
        results must be merged. With a smaller split, more threadgroups have work. The default makes about
        THREADGROUPS threadgroups, or fewer for short sequences.
    slopes: ALiBi's slopes, float32 [n_heads]; None: the model has no ALiBi
    """

    def __init__(
        self,
        views: Sequence[SequencePages],
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        split: int = 0,
        slopes: np.ndarray | None = None,
    ):
        self.views = [check(view) for view in views]
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.on_gpu = on_gpu(head_dim)  # stored here, because each layer would call on_gpu() three times
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
        # eight zeros come after the slopes, because a kernel's input has at least 8 elements
        self.slopes = None if slopes is None else mx.array(np.append(slopes, np.zeros(8, np.float32)))

    def slopes_of(self, first: int = 0, n: int | None = None) -> mx.array:
        """Return ALiBi's slopes of n query heads, from the head `first` on: float32 [n]. The default is all
        heads."""
        assert self.slopes is not None
        return self.slopes[first : first + (self.n_heads if n is None else n)]

    def _row(self, view: SequencePages, at: int, split: int) -> list[int]:
        scale = struct.unpack("i", struct.pack("f", softmax_scale(self.head_dim)))[0]
        row = params_of(
            N_TOKENS=view.n_tokens,
            FIRST=view.first,
            TABLE=at,
            SPLIT=split,
            KV_HEADS=self.n_kv_heads,
            GROUP=self.n_heads // self.n_kv_heads,
            SCALE=scale,
            SPLITS=self.splits,
        )
        row[: len(TIERS)] = view.counts()
        return row


def softmax_scale(head_dim: int) -> float:
    """Return log2(e) / sqrt(head_dim), because the kernels' exponentials are powers of two."""
    return math.log2(math.e) / math.sqrt(head_dim)


def shared_heads(group: int, head_dim: int) -> int:
    """Return the number of query heads of a threadgroup: all heads of a group, or the largest divisor of the
    group within MAX_SHARED.

    For heads of 256 numbers the limit is half of MAX_SHARED, because eight heads would need more than 32 KB
    of threadgroup memory.
    """
    most = MAX_SHARED if head_dim <= 128 else MAX_SHARED // 2
    return max(n for n in range(1, most + 1) if group % n == 0)


def unpack(pages: mx.array, tier: int, head_dim: int) -> tuple[mx.array, mx.array]:
    """Return K and V, float32 [..., 64, head_dim], of pages uint8 [..., bytes]. Rotated keys stay rotated."""
    d, flat, bits = head_dim, pages.shape[:-1], TIERS[tier].bits
    if bits == 16:
        both = pages.view(mx.float16).astype(mx.float32).reshape(*flat, 2, PAGE, d)
        return both[..., 0, :, :], both[..., 1, :, :]
    if bits == 8:
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
    """Return 2n numbers of 4 bits [..., 2n] from n bytes [..., n], the low half of each byte first."""
    both = mx.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1).astype(mx.float32)
