"""Pages with users: shared by forks, freed with the last one, within a budget."""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from ..platform.pressure import memory_pressure
from .policy import COLD, HOT, MOST, WARM, TierPolicy, tightened
from .storage import Storage

HIGH, LOW = 0.9, 0.8  # memory pressure that tightens, and that lets go again


class Page:
    """One page, and how many sequences hold it."""

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

    budget: bytes, 0 for none. Near it, and when the machine runs out of memory, the policy tightens a level;
    a page that has lost precision does not regain it. The budget bounds precision, not length: with
    everything cold a sequence still grows.
    """

    def __init__(self, storage: Storage, budget: int = 0, pressure: Callable[[], float] = memory_pressure):
        self.storage, self.budget, self.level = storage, budget, 0
        self.pressure = pressure
        self.pages = [0, 0, 0]  # in use, by tier
        self.sizes = (storage.page_bytes(COLD), storage.page_bytes(WARM), storage.page_bytes(HOT))
        self.caches: weakref.WeakSet[PageHolder] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        return sum(n * size for n, size in zip(self.pages, self.sizes, strict=True))

    def make(self) -> Page:
        return self._count(Page(self.storage.make(HOT), HOT))

    def load(self, data: bytes, tier: int) -> Page:
        """A page that was dumped."""
        return self._count(Page(self.storage.load(data, tier), tier))

    def copy(self, page: Page) -> Page:
        return self._count(Page(self.storage.copy(page.number), HOT))

    def demote(self, pages: Sequence[Page]) -> Callable[[], list[Page]]:
        """Start making the next lower tier of pages of one tier. The function that is returned gives the new
        pages; the old ones stay the caller's. Until it is called nothing is counted."""
        tier = pages[0].tier
        finish = self.storage.demote([page.number for page in pages], tier)
        return lambda: [self._count(Page(number, tier - 1)) for number in finish()]

    def release(self, page: Page) -> None:
        page.users -= 1
        if page.users == 0:
            self.pages[page.tier] -= 1
            self.storage.free(page.number, page.tier)

    def compact(self, tier: int) -> None:
        """Give back memory that no page of this tier needs; pages may get other numbers."""
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
        """Choose the level for `pages` more hot pages."""
        pressure, need = self.pressure(), pages * self.sizes[HOT]
        if self.level < MOST and (pressure > HIGH or self._exceeds(self.nbytes + need)):
            self.level += 1
        elif self.level and pressure < LOW and not self._exceeds(1.1 * (self._at(self.level - 1) + need)):
            self.level -= 1

    def _exceeds(self, nbytes: float) -> bool:
        return bool(self.budget) and nbytes > self.budget

    def _at(self, level: int) -> int:
        """Bytes that the sequences would hold had they been under this level all along."""
        return sum(tightened(c.policy, level).bytes(c.offset, self.sizes) for c in self.caches)

    def policy(self, wanted: TierPolicy) -> TierPolicy:
        return tightened(wanted, self.level)
