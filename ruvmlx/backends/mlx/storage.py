"""This module stores KV pages as MLX arrays.

Each tier (precision of pages) has one pool, an array of pages, for each layer. A page has the same number in
the pools of all layers. New pages are written into the pools with slice updates. MLX updates a slice in place
if no other reference to the array exists. On a GPU, a step holds a reference to the arrays that it reads
until the step ends. A decode step on a GPU therefore does not write its new tokens to pools, and the page
that is being filled is a separate array for each layer (`OpenPages`). When the page that is being filled is
full, it is copied into the pools. MLX evaluates most operations of this module lazily, together with the step
that needs them.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ...kv.storage import Bytes
from ...models.config.model import ModelConfig
from ...platform.mx import mx
from ...tiers import HOT, PAGE, TIERS
from .kernels import pages as layout
from .kernels.demote import demote
from .kernels.pages import SequencePages
from .kernels.source import on_gpu
from .pools import resize_pool, runs, spread_pool

# MIN_GROWTH_PAGES: for each tier, the minimum number of pages by which a pool grows, except near the memory
# limit.
MIN_GROWTH_PAGES = tuple(64 // tier.bits for tier in TIERS)
SPARE = 0.25  # a pool grows by this fraction of its pages if the result is more than MIN_GROWTH_PAGES


@dataclass(frozen=True)
class OpenPages:
    """The hot pages (float16 keys and values) that B sequences are filling.

    arrays: by layer, uint8 [B, n_kv_heads, 2, 64, 2 * head_dim]; immutable, because each step makes new
        arrays
    """

    arrays: list[mx.array]

    def of(self, index: int) -> list[mx.array]:
        """Return the open page of the sequence `index`, by layer: uint8 [1, n_kv_heads, 2, 64, 2 *
        head_dim]."""
        return [array[index : index + 1] if len(array) > 1 else array for array in self.arrays]


class MLXStorage:
    layout = "shared"  # metal_kernels/README.md
    # MLX computes a demotion (a conversion to a lower tier) as a part of a step, so a demotion cannot run in
    # the background.
    background = False

    def __init__(self, config: ModelConfig):
        self.n_layers, self.n_kv_heads, self.head_dim = config.n_layers, config.n_kv_heads, config.head_dim
        # for each tier and layer: the pool, uint8 [pages, n_kv_heads, bytes of a page of one head]; None: no
        # pool yet
        self._layers: list[list[mx.array | None]] = [[None] * self.n_layers for _ in MIN_GROWTH_PAGES]
        # For each layer: the last result of `pools`; None if `pools` must collect the arrays again.
        self._as_read: list[list[mx.array] | None] = [None] * self.n_layers
        self._capacity = [0] * len(TIERS)
        # for each tier: a heap of the unused page numbers, so that `make` returns the lowest number
        self._free: list[list[int]] = [[] for _ in TIERS]
        self._blank: OpenPages | None = None
        self.limit = 0

    # Storage ------------------------------------------------------------------------------------

    def page_bytes(self, tier: int) -> int:
        return self.n_layers * self.n_kv_heads * layout.page_bytes(tier, self.head_dim)

    def is_crowded(self, tier: int, n: int) -> bool:
        missing = n - len(self._free[tier])
        return missing > 0 and self._room() < missing * self.page_bytes(tier)

    def _room(self) -> float:
        """Return the number of bytes by which the pools can grow within `limit`; infinity without a limit."""
        return self.limit - self.nbytes if self.limit else math.inf

    def _spare(self, tier: int, pages: int) -> int:
        """Return the number of unused pages to keep beside `pages` used pages, so that the pool grows rarely.
        Near `limit`, the number is smaller."""
        wanted = max(MIN_GROWTH_PAGES[tier], int(SPARE * pages))
        return int(max(0, min(wanted, self._room() // self.page_bytes(tier))))

    def prepare(self, tier: int, n: int) -> None:
        """Grow the tier's pools once so that they have n unused pages, and need not grow at each call of
        `make`. If no page of any tier is in use, first free all pools."""
        if not self.in_use:
            self._drop_pools()
        missing = n - len(self._free[tier])
        if missing > 0:
            old = self._capacity[tier]
            new = old + max(missing, self._spare(tier, old))
            self._resize(tier, list(range(old)), new)
            # the new page numbers are larger than all numbers in the heap, so the list stays a heap
            self._free[tier] += range(old, new)

    def make(self, tier: int) -> int:
        self.prepare(tier, 1)
        return heapq.heappop(self._free[tier])

    def free(self, page: int, tier: int) -> None:
        heapq.heappush(self._free[tier], page)

    def copy(self, page: int) -> int:
        """Copy one page and return the number of the copy. The page goes through a NumPy array, because an
        MLX view of the page would prevent updates of the pool in place."""
        with self._new_pages(HOT, 1) as (to,):
            copies = [mx.array(np.array(pool[page])) for pool in self._pools(HOT)]
            for pool, copied in zip(self._pools(HOT), copies, strict=True):
                pool[to] = copied
        return to

    @contextmanager
    def _new_pages(self, tier: int, n: int) -> Iterator[list[int]]:
        """Yield the numbers of n new pages of a tier. If the block raises an exception, free the pages."""
        self.prepare(tier, n)
        made = [self.make(tier) for _ in range(n)]
        try:
            yield made
        except BaseException:
            for page in made:
                self.free(page, tier)
            raise

    def demote(self, pages: Sequence[int], tier: int) -> Callable[[], Sequence[int]]:
        """Add the conversion of the pages to the next lower tier to MLX's graph. Mostly MLX computes the
        conversion only at the next evaluation, with the step."""
        with self._new_pages(tier - 1, len(pages)) as to:
            for source, target in zip(self._pools(tier), self._pools(tier - 1), strict=True):
                made = demote(source, list(pages), self.head_dim, tier - 1)
                for start, stop in runs(to):
                    target[to[start] : to[start] + stop - start] = made[start:stop]
                if len(pages) > 1 and not on_gpu(self.head_dim):
                    # without the GPU kernel, plain MLX operations unpack pages to float32, so an evaluation
                    # of one layer at a time saves memory
                    mx.eval(target)
        return lambda: to

    def dump(self, page: int, tier: int) -> Bytes:
        """Return the bytes of a page: its bytes in the pool of each layer, one layer after the other."""
        return np.array(mx.concatenate([pool[page].reshape(-1) for pool in self._pools(tier)]))

    def load(self, data: bytes, tier: int) -> int:
        layers = np.frombuffer(data, np.uint8).reshape(self.n_layers, -1)
        with self._new_pages(tier, 1) as (to,):
            for pool, layer in zip(self._pools(tier), layers, strict=True):
                pool[to] = mx.array(layer).reshape(pool.shape[1:])
            mx.eval(*self._pools(tier))
        return to

    def new_table(self) -> "MLXTable":
        return MLXTable(self)

    def is_sparse(self, tier: int) -> bool:
        used = self._capacity[tier] - len(self._free[tier])
        wanted = used + self._spare(tier, used)
        return self._capacity[tier] >= 1.5 * wanted or wanted == used < self._capacity[tier]

    def compact(self, tier: int) -> dict[int, int]:
        """Shrink the pools of `tier` if they have many more pages than are in use, or any unused page if
        `limit` leaves no room. Returns {old number: new number} of the tier's pages in use; {} if the pools
        did not shrink or hold no page in use. If the GPU has no memory for the smaller pools, the pools stay
        as they are."""
        if not self.is_sparse(tier):
            return {}
        used = sorted(set(range(self._capacity[tier])) - set(self._free[tier]))
        wanted = len(used) + self._spare(tier, len(used))
        try:
            self._resize(tier, used, wanted)
        except RuntimeError:
            return {}
        self._free[tier] = list(range(len(used), wanted))
        return {old: new for new, old in enumerate(used)}

    # For attention ------------------------------------------------------------------------------

    def write(self, layer: int, pages: Sequence[int], at: int, rows: mx.array) -> None:
        """Write the keys and values of a prompt's T new tokens into hot pages, from token `at` of the first
        page on.

        rows: uint8 [n_kv_heads, 2, T, 2 * head_dim], float16 keys and values
        """
        heads, _, tokens, width = rows.shape
        pool = self._pools(HOT)[layer].reshape(-1, heads, 2, PAGE, width)
        first = min(PAGE - at, tokens) if at or tokens < PAGE else 0
        if first:
            pool[pages[0], :, :, at : at + first] = rows[:, :, :first]
        left, whole = list(pages[bool(first) :]), (tokens - first) // PAGE
        for start, stop in runs(left[:whole]):
            some = rows[:, :, first + PAGE * start : first + PAGE * stop]
            some = some.reshape(heads, 2, stop - start, PAGE, width).transpose(2, 0, 1, 3, 4)
            pool[left[start] : left[start] + stop - start] = some
        if rest := tokens - first - PAGE * whole:
            pool[left[whole], :, :, :rest] = rows[:, :, tokens - rest :]
        self._layers[HOT][layer] = pool.reshape(-1, heads, 2 * PAGE * width)
        self._as_read[layer] = None

    def write_page(self, page: int, arrays: Sequence[mx.array]) -> None:
        """Copy an open page into the pools, to the hot page with the number `page`. arrays: by layer, [1,
        n_kv_heads, 2, 64, 2 * head_dim]."""
        mx.synchronize()  # wait until the GPU has ended the last step and so has released the pools
        for pool, array in zip(self._pools(HOT), arrays, strict=True):
            pool[page] = array.reshape(pool.shape[1:])
        mx.eval(*self._pools(HOT))

    def open_page(self, page: int | None) -> OpenPages:
        """Return a copy of a hot page that is not full yet, as an open page; if `page` is None, return an
        empty open page."""
        if page is not None:
            shape = (1, self.n_kv_heads, 2, PAGE, 2 * self.head_dim)
            # The page is copied, because a view of the page would prevent changes of the pool in place.
            return OpenPages(
                [(pool[page] | mx.array(0, mx.uint8)).reshape(shape) for pool in self._pools(HOT)]
            )
        if self._blank is None:
            empty = mx.zeros((1, self.n_kv_heads, 2, PAGE, 2 * self.head_dim), mx.uint8)
            mx.eval(empty)
            self._blank = OpenPages([empty] * self.n_layers)
        return self._blank

    def pools(self, layer: int) -> list[mx.array]:
        """Return the pools of a layer by tier, as the kernels read them: another tier's pool stands in for a
        tier without a pool."""
        found = self._as_read[layer]
        if found is None:
            held = [tier[layer] for tier in self._layers]
            some = next(pool for pool in held if pool is not None)
            found = self._as_read[layer] = [some if pool is None else pool for pool in held]
        return found

    def arrays(self) -> list[mx.array]:
        return [pool for tier in self._layers for pool in tier if pool is not None]

    @property
    def in_use(self) -> int:
        """Return the number of pages in use, the sum over all tiers."""
        return sum(self._capacity) - sum(map(len, self._free))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pools, including unused pages."""
        return sum(pool.nbytes for pool in self.arrays())

    # Inside -------------------------------------------------------------------------------------

    def _pools(self, tier: int) -> list[mx.array]:
        return [pool for pool in self._layers[tier] if pool is not None]

    def _resize(self, tier: int, kept: list[int], capacity: int) -> None:
        """Replace the pools of all layers of a tier by pools of `capacity` pages, which begin with the old
        pages `kept`. Then clear MLX's buffer cache, because MLX could hardly reuse buffers of the old pools'
        size. If MLX raises RuntimeError, for example because the GPU has no memory, the pages keep their old
        numbers."""
        self._as_read = [None] * self.n_layers
        if self._room() < (capacity - len(kept)) * self.page_bytes(tier) + self.nbytes:
            self._resize_by_layer(tier, kept, capacity)
        else:
            new = [self._new_pool(tier, layer, kept, capacity) for layer in range(self.n_layers)]
            mx.eval(*new)
            self._layers[tier][:] = new
        mx.clear_cache()
        self._capacity[tier] = capacity

    def _new_pool(self, tier: int, layer: int, kept: list[int], capacity: int) -> mx.array:
        page = self.n_kv_heads, layout.page_bytes(tier, self.head_dim)
        return resize_pool(self._layers[tier][layer], kept, capacity, page)

    def _resize_by_layer(self, tier: int, kept: list[int], capacity: int) -> None:
        """Do the work of `_resize` near the memory limit: free the old pool of a layer before the next
        layer's new pool is made."""
        pools, before = self._layers[tier], self._capacity[tier]
        for layer in range(self.n_layers):
            try:
                new = self._new_pool(tier, layer, kept, capacity)
                mx.eval(new)
            except RuntimeError:
                if kept != list(range(before)):  # the earlier layers have new page numbers
                    for done in range(layer):
                        pools[done] = spread_pool(pools[done], kept, before)
                        mx.eval(pools[done])
                raise
            pools[layer] = new
            mx.clear_cache()

    def _drop_pools(self) -> None:
        """Free all pools. The caller has checked that no page is in use."""
        if any(self._capacity):
            self._as_read = [None] * self.n_layers
            for tier in range(len(TIERS)):
                self._layers[tier] = [None] * self.n_layers
                self._capacity[tier], self._free[tier] = 0, []
            mx.clear_cache()


class MLXTable:
    """The page table of one sequence: the number and the tier of each page, and the open page (the page that
    is being filled)."""

    def __init__(self, storage: MLXStorage) -> None:
        self._storage = storage
        # The number and tier of each page; None: the page is before the sliding window and was dropped.
        self._rows: list[tuple[int, int] | None] = []
        self._tiers: tuple[list[int], ...] | None = None
        # the OpenPages object with this sequence's open page, and the index of this sequence in the object
        self._open: tuple[OpenPages, int] | None = None
        # the index of the open page in the sequence; its hot page in the pools is out of date
        self._open_at = -1

    def set(self, index: int, page: int, tier: int) -> None:
        self._rows += [None] * (index + 1 - len(self._rows))
        self._rows[index] = page, tier
        self._tiers = None

    def clear(self, index: int) -> None:
        self._rows[index] = None
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
        self._tiers = None

    def share(self, other: "MLXTable") -> None:
        """Let `other`, the table of a fork of this sequence, also use this table's open page. The arrays of
        open pages are immutable, so each of the two sequences makes its own next version of the page."""
        other._open, other._open_at = self._open, self._open_at

    def flush(self) -> None:
        """Write the open page into its hot page in the pools; then the table has no open page."""
        if self._open is not None and self._open_at < len(self._rows):
            pages, index = self._open
            self._storage.write_page(self._hot(self._open_at), pages.of(index))
        self._open, self._open_at = None, -1

    def open_page_at(self, position: int) -> tuple[OpenPages, int]:
        """Return the `OpenPages` object whose page will hold the token at this position, and the index of
        this sequence in the object. If this page is not the table's open page, make it the open page."""
        at = position // PAGE
        if self._open is None or self._open_at != at:
            if self._open_at == at - 1:
                self.flush()
            page = self._hot(at) if position % PAGE else None
            self.fill(position, self._storage.open_page(page), 0)
        assert self._open is not None
        return self._open

    def fill(self, position: int, pages: OpenPages, index: int) -> None:
        """Replace the open page, which has the token at `position`, by the page of sequence `index` in
        `pages`."""
        self._open, self._open_at = (pages, index), position // PAGE

    @property
    def nbytes(self) -> int:
        return 4 * len(self._rows)  # the table has 4 bytes for each page in the form that the kernels read

    def hot_page(self, position: int) -> int:
        return self._hot(position // PAGE)

    def _hot(self, index: int) -> int:
        row = self._rows[index]
        if row is None or row[1] != HOT:
            raise ValueError(f"position {PAGE * index} has no hot page to be written to")
        return row[0]

    def view(self, n_tokens: int, first: int = 0) -> SequencePages:
        """Return the numbers of the pages of the first n_tokens tokens in the form that the kernels read.
        first: the first token that the kernels read."""
        if self._tiers is None:
            self._tiers = self._by_tier()
        *lower, hot = self._tiers
        pages = -(-n_tokens // PAGE)
        return SequencePages([*lower, hot[: pages - sum(map(len, lower))]], n_tokens, first)

    def _by_tier(self) -> tuple[list[int], ...]:
        """Return, for each tier, the numbers of this sequence's pages. A dropped page is listed with number 0
        in the tier of the first page that exists; the kernels do not read a dropped page."""
        held = [row for row in self._rows if row is not None]
        rows = [row or (0, held[0][1]) for row in self._rows]
        return tuple([number for number, tier in rows if tier == t] for t in range(len(TIERS)))
