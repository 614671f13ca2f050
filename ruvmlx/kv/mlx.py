"""Pages as MLX arrays.

Per tier and layer there is one pool; a page has the same number in all layers' pools. Pools change by slice
updates, which MLX does in place as long as nobody else holds the array. Everything here is lazy: who runs a
step evaluates `arrays()` with it.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from ..backends.mx import mx
from ..kernels.metal import pages as layout
from ..kernels.metal.demote import demote_cold, demote_warm
from ..kernels.metal.pages import View
from ..models.base import ModelConfig
from .policy import COLD, HOT, PAGE, WARM
from .storage import Bytes

GROWTH = (16, 8, 4)  # pages that a pool grows by, by tier


class MLXStorage:
    def __init__(self, config: ModelConfig):
        self.n_layers, self.n_kv_heads, self.head_dim = config.n_layers, config.n_kv_heads, config.head_dim
        # uint8 [pages, n_kv_heads, head_page_bytes]; hot: [pages, n_kv_heads, K or V, token, 2 * head_dim]
        self._layers: list[list[mx.array | None]] = [[None] * self.n_layers for _ in GROWTH]
        self._capacity = [0, 0, 0]
        self._free: list[list[int]] = [[], [], []]  # heaps: low numbers first
        self._begun = False  # something that no step has evaluated

    # Storage ------------------------------------------------------------------------------------

    def page_bytes(self, tier: int) -> int:
        return self.n_layers * self.n_kv_heads * layout.page_bytes(tier, self.head_dim)

    def make(self, tier: int) -> int:
        if not self.in_use:
            self._drop_pools()
        if not self._free[tier]:
            self._grow(tier)
        return heapq.heappop(self._free[tier])

    def free(self, page: int, tier: int) -> None:
        heapq.heappush(self._free[tier], page)

    def copy(self, page: int) -> int:
        to = self.make(HOT)
        for pool in self._pools(HOT):
            pool[to] = pool[page]
        return to

    def demote(self, pages: Sequence[int], tier: int) -> Callable[[], Sequence[int]]:
        """Described at once, computed with the next evaluation."""
        to, lower = [self.make(tier - 1) for _ in pages], demote_warm if tier == HOT else demote_cold
        for source, target in zip(self._pools(tier), self._pools(tier - 1), strict=True):
            made = lower(_flat(source), list(pages), self.head_dim)
            for i, page in enumerate(to):
                target[page] = made[i]
        self._begun = True
        return lambda: to

    def dump(self, page: int, tier: int) -> Bytes:
        """All layers, one after the other."""
        return np.array(mx.concatenate([pool[page].reshape(-1) for pool in self._pools(tier)]))

    def load(self, data: bytes, tier: int) -> int:
        to, layers = self.make(tier), np.frombuffer(data, np.uint8).reshape(self.n_layers, -1)
        for pool, layer in zip(self._pools(tier), layers, strict=True):
            pool[to] = mx.array(layer).reshape(pool.shape[1:])
        mx.eval(*self._pools(tier))
        return to

    def new_table(self) -> "MLXTable":
        return MLXTable()

    # What the attention needs -------------------------------------------------------------------

    def write(self, layer: int, page: int, at: int, rows: mx.array) -> None:
        """rows: uint8 [n_kv_heads, 2, T, 2 * head_dim], float16 keys and values, into a hot page."""
        pool = self._layers[HOT][layer]
        assert pool is not None  # there is a page
        pool[page, :, :, at : at + rows.shape[2]] = rows

    def pools(self, layer: int) -> list[mx.array]:
        """[COLD], [WARM], [HOT] of a layer, as the kernels take them."""
        held = [tier[layer] for tier in self._layers]
        some = next(pool for pool in held if pool is not None)
        return [_flat(some if pool is None else pool) for pool in held]

    def arrays(self) -> list[mx.array]:
        return [pool for tier in self._layers for pool in tier if pool is not None]

    def start(self) -> None:
        """Have what was begun computed while others work: what stayed lazy could not change threads."""
        if self._begun:
            mx.async_eval(*self.arrays())
            self._begun = False

    @property
    def in_use(self) -> int:
        """Pages of all tiers."""
        return sum(self._capacity) - sum(map(len, self._free))

    @property
    def nbytes(self) -> int:
        """Of the pools: the pages in use and those in reserve."""
        return sum(pool.nbytes for pool in self.arrays())

    # How ----------------------------------------------------------------------------------------

    def _pools(self, tier: int) -> list[mx.array]:
        return [pool for pool in self._layers[tier] if pool is not None]

    def _grow(self, tier: int) -> None:
        """A layer at a time: the old and the new pool of one layer is all that memory has to hold more."""
        old, heads, pools = self._capacity[tier], self.n_kv_heads, self._layers[tier]
        rest = (2, PAGE, 2 * self.head_dim) if tier == HOT else (layout.page_bytes(tier, self.head_dim),)
        for layer in range(self.n_layers):
            pools[layer] = _longer(pools[layer], old, mx.zeros((GROWTH[tier], heads, *rest), mx.uint8))
            mx.eval(pools[layer])
        self._capacity[tier] = old + GROWTH[tier]
        self._free[tier] = list(range(old, self._capacity[tier]))

    def _drop_pools(self) -> None:
        """Nobody has a page: a long conversation's memory goes back."""
        for tier in (COLD, WARM, HOT):
            self._layers[tier] = [None] * self.n_layers
            self._capacity[tier], self._free[tier] = 0, []


class MLXTable:
    """The pages of one sequence, by tier."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int] | None] = []  # number and tier; None: left behind by the window
        self._tiers: tuple[list[int], ...] | None = None

    def set(self, index: int, page: int, tier: int) -> None:
        self._rows += [None] * (index + 1 - len(self._rows))
        self._rows[index] = page, tier
        self._tiers = None

    def clear(self, index: int) -> None:
        self._rows[index] = None
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
        self._tiers = None

    @property
    def nbytes(self) -> int:
        return 4 * len(self._rows)  # as the kernels read it

    def hot_page(self, position: int) -> int:
        row = self._rows[position // PAGE]
        if row is None or row[1] != HOT:
            raise ValueError(f"position {position} has no hot page to be written to")
        return row[0]

    def view(self, n_tokens: int, first: int = 0) -> View:
        """The first n_tokens, as the kernels see them; tokens before `first` are not looked at."""
        if self._tiers is None:
            self._tiers = self._by_tier()
        cold, warm, hot = self._tiers
        pages = -(-n_tokens // PAGE)
        return View(cold, warm, hot[: pages - len(cold) - len(warm)], n_tokens, first)

    def _by_tier(self) -> tuple[list[int], ...]:
        """Pages that are gone count as the first that is there: any number does, none of them is read."""
        held = [row for row in self._rows if row is not None]
        rows = [row or (0, held[0][1]) for row in self._rows]
        return tuple([number for number, tier in rows if tier == t] for t in (COLD, WARM, HOT))


def _longer(pool: mx.array | None, old: int, new: mx.array) -> mx.array:
    return new if pool is None else mx.concatenate([pool[:old], new])


def _flat(pool: mx.array) -> mx.array:
    """[pages, n_kv_heads, head_page_bytes]"""
    return pool.reshape(*pool.shape[:2], -1)
