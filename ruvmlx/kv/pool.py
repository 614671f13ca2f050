"""This module holds the KV pages of all sequences within a memory budget. Forks of a sequence share pages, so
the pool counts the users of each page. The last user frees the page."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..platform.pressure import memory_pressure
from ..tiers import HOT, TIERS
from .policy import MAX_LEVEL, TierPolicy, tighten
from .storage import Storage

# memory pressure (0 to 1): above HIGH the policy tightens (lowers the precision); below LOW the policy
# relaxes
HIGH, LOW = 0.9, 0.8
# The number of pages that are demoted (moved to a lower tier) together. During a demotion, the old and the
# new version of a page use memory.
AT_ONCE = 8


class Page:
    """One page and the number of sequences that use it.

    lower: the page of the next lower tier that replaces this page; set when its demotion starts
    wait: while a demotion makes this page, a function that waits for the demotion; else None. Before the end
        of the demotion the page has no number.
    """

    __slots__ = ("lower", "number", "tier", "users", "wait")

    def __init__(self, number: int, tier: int):
        self.number, self.tier, self.users = number, tier, 1
        self.lower: Page | None = None
        self.wait: Callable[[], None] | None = None


# a function that waits for a demotion and returns the pages of the next lower tier
Lower = Callable[[], list[Page]]


class PageHolder(Protocol):
    """The part of a sequence's cache that the pool uses."""

    pages: list[Page | None]
    offset: int
    policy: TierPolicy

    def refresh_page_numbers(self) -> None:
        """Update the page table. The pool calls this method after it has renumbered pages."""


class PagePool:
    """A pool holds all pages of a backend, and the level (0: no pressure) by which the tier policies of all
    sequences are now tightened.

    Near the budget, or when the machine runs out of memory, the policy tightens by one level: pages lose
    precision at a lower age. A page that was converted to a lower precision keeps this precision. The budget
    limits precision, not length: a sequence still grows when every page is in the lowest tier. Admission
    (engine/admission.py) limits the length.

    budget: the maximum bytes of all pages; 0: no budget
    least: the minimum level of tightening (0: none), at which all running sequences fit
    """

    def __init__(self, storage: Storage, budget: int = 0, pressure: Callable[[], float] = memory_pressure):
        self.storage, self.level, self.least = storage, 0, 0
        self.budget = budget
        self.pressure = pressure
        # A function that frees a cache that no running request uses. The function returns True if it freed a
        # cache.
        self.reclaim: Callable[[], bool] = lambda: False
        self._pages = [0] * len(TIERS)
        self.sizes = tuple(map(storage.page_bytes, range(len(TIERS))))
        self.caches: weakref.WeakSet[PageHolder] = weakref.WeakSet()
        self._abandoned: deque[tuple[Sequence[Page | None], Sequence[Lower]]] = deque()
        self._thread = 0  # the id of the thread that makes pages; only this thread releases pages

    @property
    def budget(self) -> int:
        return self._budget

    @budget.setter
    def budget(self, nbytes: int) -> None:
        self._budget = self.storage.limit = nbytes

    @property
    def pages(self) -> list[int]:
        """Return the number of pages in use, by tier."""
        self.release_abandoned()
        return self._pages

    @property
    def nbytes(self) -> int:
        return sum(n * size for n, size in zip(self.pages, self.sizes, strict=True))

    def make(self) -> Page:
        self._make_room(HOT, 1)
        return self._count(Page(self.storage.make(HOT), HOT))

    def load(self, data: bytes, tier: int) -> Page:
        """Return a new page from the bytes of a dump."""
        self._make_room(tier, 1)
        return self._count(Page(self.storage.load(data, tier), tier))

    def copy(self, page: Page) -> Page:
        self._make_room(HOT, 1)
        return self._count(Page(self.storage.copy(page.number), HOT))

    def demote(self, pages: Sequence[Page]) -> Lower:
        """Start to convert pages of one tier to the next lower tier. Returns a function that waits and
        returns the new pages. The budget includes the new pages from now on; the caller still has to release
        the old pages. Sequences that share a page also share the page's version in the lower tier."""
        self._make_room(pages[0].tier - 1, len(pages))
        found = [page.lower for page in pages if page.lower is not None and page.lower.users]
        fresh = [page for page in pages if page.lower is None or not page.lower.users]
        if fresh:
            self._begin(fresh)
        for page in found:
            page.users += 1
        made = [page.lower for page in pages if page.lower is not None]

        def result() -> list[Page]:
            for page in made:
                if page.wait is not None:
                    page.wait()
            return made

        return result

    def at_once(self, tier: int) -> int:
        """Return the number of pages of a tier to demote together. Near the budget, the number is smaller
        than AT_ONCE, because during a demotion both versions of a page use memory."""
        if not self.budget:
            return AT_ONCE
        return max(1, min(AT_ONCE, (self.budget - self.nbytes) // self.sizes[tier - 1]))

    def _begin(self, pages: Sequence[Page]) -> None:
        """Start to convert each of these pages to the next lower tier."""
        tier = pages[0].tier - 1
        finish, made = self.storage.demote([page.number for page in pages], tier + 1), list[Page]()

        def wait() -> None:
            for page, number in zip(made, finish(), strict=True):
                page.number, page.wait = number, None

        for page in pages:
            page.lower = self._count(Page(-1, tier))
            page.lower.wait = wait
            made.append(page.lower)

    def release(self, page: Page) -> None:
        page.users -= 1
        if page.users == 0:
            self._pages[page.tier] -= 1
            self.storage.free(page.number, page.tier)

    def abandon(self, pages: Sequence[Page | None], begun: Sequence[Lower]) -> None:
        """Note these pages, and the pages of demotions that have begun, so that they are released later.

        The garbage collector can call this function in any thread, and in the middle of any work of the pool.
        During a garbage collection a wait for another thread could last for ever.
        """
        self._abandoned.append((pages, begun))

    def release_abandoned(self) -> None:
        """Release the pages of abandoned sequences, if this is the thread that makes pages."""
        while self._abandoned and self._thread == threading.get_ident():
            pages, begun = self._abandoned.popleft()
            for page in (*pages, *(page for result in begun for page in result())):
                if page is not None:
                    self.release(page)

    def compact(self, tier: int) -> None:
        """Return unused memory of a tier to the system. After the call, the pages can have other numbers."""
        moved = self.storage.compact(tier)
        if not moved:
            return
        held = {id(page): page for cache in self.caches for page in cache.pages if page is not None}
        for page in held.values():
            if page.tier == tier:
                page.number = moved[page.number]
        for cache in self.caches:
            cache.refresh_page_numbers()

    def _count(self, page: Page) -> Page:
        self._pages[page.tier] += 1
        return page

    def adapt(self, pages: int) -> bool:
        """Choose the level of tightening before `pages` more hot pages are made. Before the level rises, free
        caches that no running request uses. Returns True if the level rose."""
        before = self.level
        pressure, need = self.pressure(), pages * self.sizes[HOT]
        if pressure > HIGH:
            self.reclaim()
        self._make_room(HOT, pages)
        if self.level < self.least:
            self.level = self.least
        elif self.level < MAX_LEVEL and (pressure > HIGH or self._exceeds(self.nbytes + need)):
            self.level += 1
        elif self.level > self.least and pressure < LOW and self._fits_at(self.level - 1, need):
            self.level -= 1
        return self.level > before

    def _make_room(self, tier: int, n: int) -> None:
        """Free caches that no running request uses, until n more pages of a tier fit into the budget."""
        self._thread = threading.get_ident()
        self.release_abandoned()
        while self._exceeds(self.nbytes + n * self.sizes[tier]) and self.reclaim():
            pass
        if self.budget and self.storage.is_crowded(tier, n):
            for each in range(len(TIERS)):
                self.compact(each)

    def _fits_at(self, level: int, need: int) -> bool:
        return not self._exceeds(1.1 * (self._at(level) + need))

    def _exceeds(self, nbytes: float) -> bool:
        return bool(self.budget) and nbytes > self.budget

    def _at(self, level: int) -> int:
        """Return the bytes that all sequences would take if each sequence had used this level of tightening
        from its start."""
        return sum(tighten(c.policy, level).bytes(c.offset, self.sizes) for c in self.caches)

    def policy(self, wanted: TierPolicy) -> TierPolicy:
        return tighten(wanted, self.level)
