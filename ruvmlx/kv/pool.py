"""This module manages the KV pages of all sequences of a backend under a memory budget. Forks of a sequence
share pages, so the pool counts the sequences that use a page, and frees the page when the last of these
sequences releases the page."""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..platform.pressure import memory_pressure
from ..tiers import HOT, TIERS
from .policy import FOUR_BIT_LEVEL, MAX_LEVEL, TierPolicy, tighten
from .storage import Storage

# memory pressure (0 to 1): above HIGH the pool tightens the policies (pages lose precision earlier); below
# LOW the pool relaxes the policies
HIGH, LOW = 0.9, 0.8
# The maximum number of pages that are demoted (moved to a lower tier) together, except early demotions.
# During a demotion, the old and the new version of a page use memory.
AT_ONCE = 8


class Page:
    """One page and the number of sequences that use it.

    lower: the page in the next lower tier that replaces this page; None before the demotion of this page
        starts
    wait: while a demotion makes this page, a function that waits for the end of the demotion; else None.
        Until the end of the demotion, the number of this new page is -1.
    """

    __slots__ = ("lower", "number", "tier", "users", "wait")

    def __init__(self, number: int, tier: int):
        self.number, self.tier, self.users = number, tier, 1
        self.lower: Page | None = None
        self.wait: Callable[[], None] | None = None


KEPT_CHANGES = 64  # the number of newest changes of the level that a pool keeps


@dataclass(frozen=True)
class LevelChange:
    """A change of a pool's level of tightening. pressure: the memory pressure then, 0 to 1. nbytes: the bytes
    of all pages then. why: the reason, in words."""

    before: int
    after: int
    pressure: float
    nbytes: int
    why: str


# a function that waits for a demotion and returns the pages of the next lower tier
Lower = Callable[[], list[Page]]


class PageHolder(Protocol):
    """The attributes of a sequence's KV cache that the pool uses."""

    pages: list[Page | None]
    offset: int
    policy: TierPolicy

    def refresh_page_numbers(self) -> None:
        """Update the page table. The pool calls this method after it has renumbered pages."""


class PagePool:
    """A pool manages all KV pages of a backend, and sets the level (0: no pressure) by which the tier
    policies of all sequences are tightened.

    If new pages would exceed the budget, or when the machine runs short of memory, the pool raises the level
    by one, up to MAX_LEVEL: pages lose precision at a lower age. A page never returns to a higher precision.
    The budget lowers the precision but does not stop a sequence: the sequence still grows when all its old
    pages are in the lowest tier. Admission (engine/admission.py) limits the length of a sequence.

    budget: the number of bytes that all pages should not exceed; 0: no limit
    least: the minimum level of tightening (0: none), which admission sets so that all running sequences fit
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
        # the newest changes of the level; the optimizer takes them out and records them in the log
        self.level_changes: deque[LevelChange] = deque(maxlen=KEPT_CHANGES)
        self._thread = 0  # the id of the thread that makes pages; only this thread runs `release_abandoned`

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
        """Return a new page with the bytes `data`, which `Storage.dump` returned."""
        self._make_room(tier, 1)
        return self._count(Page(self.storage.load(data, tier), tier))

    def copy(self, page: Page) -> Page:
        self._make_room(HOT, 1)
        return self._count(Page(self.storage.copy(page.number), HOT))

    def demote(self, pages: Sequence[Page]) -> Lower:
        """Start to convert pages of one tier to the next lower tier. Returns a function that waits for the
        end of the conversion and returns the new pages. The pool counts the bytes of the new pages at once;
        the caller must release the old pages. Sequences that share a page also share its new version in the
        lower tier."""
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
        """Return the maximum number of pages of a tier that are demoted together. Near the budget, the result
        is smaller than AT_ONCE, because during a demotion the old and the new version of a page use
        memory."""
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
        """Note the pages of a deleted cache, and its early demotions, so that `release_abandoned` releases
        the pages.

        The garbage collector can cause this call in any thread, and in the middle of any work of the pool, so
        the function does not wait for a lock: the wait could last for ever.
        """
        self._abandoned.append((pages, begun))

    def release_abandoned(self) -> None:
        """Release the pages of deleted caches that `abandon` noted, if the calling thread is the thread that
        makes pages."""
        while self._abandoned and self._thread == threading.get_ident():
            pages, begun = self._abandoned.popleft()
            for page in (*pages, *(page for result in begun for page in result())):
                if page is not None:
                    self.release(page)

    def compact(self, tier: int) -> None:
        """Return the unused page memory of a tier to the system. The call can give new numbers to the tier's
        pages. If a page in use belongs to no known list of pages, its number could not be changed, so the
        call then does nothing."""
        self.release_abandoned()
        if not self.storage.is_sparse(tier):
            return
        # A cache can be deleted in the meantime. Its pages are then in `_abandoned`, which is read last.
        lists = [cache.pages for cache in self.caches] + [pages for pages, _ in list(self._abandoned)]
        held = {id(page): page for pages in lists for page in pages if page is not None}
        own = [page for page in held.values() if page.tier == tier]
        if len(own) != self._pages[tier]:
            return
        moved = self.storage.compact(tier)
        for page in own:
            page.number = moved.get(page.number, page.number)
        for cache in self.caches:
            cache.refresh_page_numbers()

    def _count(self, page: Page) -> Page:
        self._pages[page.tier] += 1
        return page

    def adapt(self, pages: int) -> bool:
        """Raise or lower the level of tightening if memory needs it, before `pages` more hot pages are made.
        Memory pressure above HIGH raises the level to FOUR_BIT_LEVEL at once; all other changes are by one,
        or to `least`. If memory is short, first free caches that no running request uses. Returns True if the
        level rose."""
        before = self.level
        pressure, need = self.pressure(), pages * self.sizes[HOT]
        if pressure > HIGH:
            self.reclaim()
        self._make_room(HOT, pages)
        self.level, why = self._next_level(pressure, need)
        if self.level != before:
            self.level_changes.append(LevelChange(before, self.level, pressure, self.nbytes, why))
        return self.level > before

    @contextlib.contextmanager
    def same_level(self) -> Iterator[None]:
        """In the `with` block, a measurement makes caches. After the block, the level is that from before the
        block, because the memory of these caches is free again."""
        level, known = self.level, len(self.level_changes)
        try:
            yield
        finally:
            self.level = level
            while len(self.level_changes) > known:
                self.level_changes.pop()

    def _next_level(self, pressure: float, need: int) -> tuple[int, str]:
        """Return the level that memory needs now, and the reason. need: the bytes of the next pages."""
        level = self.level
        if level < self.least:
            return self.least, "the running replies must fit into the budget"
        if level < MAX_LEVEL and pressure > HIGH:
            return max(level + 1, FOUR_BIT_LEVEL), f"memory pressure is above {HIGH}"
        if level < MAX_LEVEL and self._exceeds(self.nbytes + need):
            return level + 1, "the budget is full"
        if level > self.least and pressure < LOW and self._fits_at(level - 1, need):
            return level - 1, f"memory pressure is below {LOW}, and the budget has room"
        return level, ""

    def _make_room(self, tier: int, n: int) -> None:
        """Free caches that no running request uses, until n more pages of a tier fit into the budget or no
        such cache is left. If unused pages of the storage take the room, compact all tiers."""
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
        """Return the bytes that the pages of all sequences would take if each sequence had used this level of
        tightening from its start."""
        return sum(tighten(c.policy, level).bytes(c.offset, self.sizes) for c in self.caches)

    def policy(self, wanted: TierPolicy) -> TierPolicy:
        return tighten(wanted, self.level)
