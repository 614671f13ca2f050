"""Reference-counted pages within a memory budget: forks share them, the last user frees them."""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from ..platform.pressure import memory_pressure
from ..tiers import HOT, TIERS
from .policy import MOST, TierPolicy, tightened
from .storage import Storage

HIGH, LOW = 0.9, 0.8  # memory pressure above which the policy tightens, and below which it relaxes


class Page:
    """One page and the number of sequences that use it."""

    __slots__ = ("number", "tier", "users")

    def __init__(self, number: int, tier: int):
        self.number, self.tier, self.users = number, tier, 1


class PageHolder(Protocol):
    """A sequence's cache, as the pool sees it."""

    pages: list[Page | None]
    offset: int
    policy: TierPolicy

    def renumbered(self) -> None:
        """Called after pages got other numbers."""


class PagePool:
    """All pages of a backend, and the policy in force for them.

    budget: bytes, 0 for none. Near the budget, or when the machine runs out of memory, the policy tightens by
    one level; a page that has lost precision does not regain it. The budget limits precision, not length:
    with every page in the lowest tier a sequence still grows.
    """

    def __init__(self, storage: Storage, budget: int = 0, pressure: Callable[[], float] = memory_pressure):
        self.storage, self.budget, self.level = storage, budget, 0
        self.pressure = pressure
        self.pages = [0] * len(TIERS)  # in use, by tier
        self.sizes = tuple(map(storage.page_bytes, range(len(TIERS))))
        self.caches: weakref.WeakSet[PageHolder] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        return sum(n * size for n, size in zip(self.pages, self.sizes, strict=True))

    def make(self) -> Page:
        return self._count(Page(self.storage.make(HOT), HOT))

    def load(self, data: bytes, tier: int) -> Page:
        """A page from the bytes of a dump."""
        return self._count(Page(self.storage.load(data, tier), tier))

    def copy(self, page: Page) -> Page:
        return self._count(Page(self.storage.copy(page.number), HOT))

    def demote(self, pages: Sequence[Page]) -> Callable[[], list[Page]]:
        """Start converting pages of one tier to the next lower tier. Returns a function that waits and gives
        the new pages; they are counted from then on. The old pages stay the caller's."""
        tier = pages[0].tier
        finish = self.storage.demote([page.number for page in pages], tier)
        return lambda: [self._count(Page(number, tier - 1)) for number in finish()]

    def release(self, page: Page) -> None:
        page.users -= 1
        if page.users == 0:
            self.pages[page.tier] -= 1
            self.storage.free(page.number, page.tier)

    def compact(self, tier: int) -> None:
        """Return unused memory of a tier to the system; pages may get other numbers."""
        moved = self.storage.compact(tier)
        if not moved:
            return
        held = {id(page): page for cache in self.caches for page in cache.pages if page is not None}
        for page in held.values():
            if page.tier == tier:
                page.number = moved[page.number]
        for cache in self.caches:
            cache.renumbered()

    def _count(self, page: Page) -> Page:
        self.pages[page.tier] += 1
        return page

    def adapt(self, pages: int) -> None:
        """Choose the level of tightening before `pages` more hot pages are made."""
        pressure, need = self.pressure(), pages * self.sizes[HOT]
        if self.level < MOST and (pressure > HIGH or self._exceeds(self.nbytes + need)):
            self.level += 1
        elif self.level and pressure < LOW and not self._exceeds(1.1 * (self._at(self.level - 1) + need)):
            self.level -= 1

    def _exceeds(self, nbytes: float) -> bool:
        return bool(self.budget) and nbytes > self.budget

    def _at(self, level: int) -> int:
        """Bytes that all sequences would hold if this level had been in force from the start."""
        return sum(tightened(c.policy, level).bytes(c.offset, self.sizes) for c in self.caches)

    def policy(self, wanted: TierPolicy) -> TierPolicy:
        return tightened(wanted, self.level)
