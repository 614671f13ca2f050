"""This module is the KV cache of one sequence, in pages whose precision falls with the age of their tokens.

A page has a tier, its precision (ruvmlx/tiers.py). From the oldest page to the newest the tiers rise: cold,
warm, hot. To demote a page is to lower its tier. Only the last page can be partly filled. Without memory
pressure, the calls and their numbers of tokens, not the time, decide the tiers, so the same calls give the
same bits.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from ..tiers import EVERYTHING, HOT, PAGE, TIERS
from .policy import TIERED, TierPolicy
from .pool import Lower, Page, PagePool
from .storage import Bytes

# number of tokens kept before a sliding window; a trim of SLACK tokens mostly leaves the window complete
SLACK = 256
AHEAD = 32  # an early demotion starts at most AHEAD tokens before its page must have the lower tier


@dataclass(frozen=True)
class KVStats:
    """The size of a KV cache.

    tokens: the number of tokens, by tier
    bytes: the bytes of the pages and of the page table
    f16_bytes: the bytes that the same pages would take if each page were in f16
    tier_bytes: the bytes of the pages by tier, with their scales
    """

    policy: str
    tokens: tuple[int, ...]
    bytes: int
    f16_bytes: int
    tier_bytes: tuple[int, ...]

    @classmethod
    def all_f16(cls, policy: str, tokens: int, nbytes: int, f16_bytes: int) -> "KVStats":
        """Return the size of a cache whose tokens are all stored in f16, in no lower tier."""
        lower = (0,) * HOT
        return cls(policy, (*lower, tokens), nbytes, f16_bytes, (*lower, nbytes))

    def facts(self) -> dict[str, Any]:
        """Return {"policy", "hot_tokens", "warm_tokens", .., "bytes", "f16_bytes"}: fields in the JSON output
        of commands."""
        tokens = _by_name("tokens", self.tokens)
        return {"policy": self.policy, **tokens, "bytes": self.bytes, "f16_bytes": self.f16_bytes}

    def byte_facts(self) -> dict[str, int]:
        """Return {"hot_bytes", "warm_bytes", ..}."""
        return _by_name("bytes", self.tier_bytes)


def _by_name(unit: str, values: tuple[int, ...]) -> dict[str, int]:
    """Return one value for each tier, named by tier and unit: {"hot_tokens": .., "warm_tokens": ..}."""
    named = zip((f"{tier.name}_{unit}" for tier in TIERS), values, strict=True)
    return dict(reversed([*named]))


@dataclass(frozen=True)
class Dump:
    """The content of a cache in the form that is written to disk.

    facts: the result of `facts_of`; for a cache without pages, the values (JSON) that its `restore` needs
    nbytes: the number of bytes of all parts
    parts: the bytes of the pages; the caller must read them before the cache changes
    """

    facts: dict[str, Any]
    nbytes: int
    parts: Iterator[Bytes]


def facts_of(layout: str, offset: int, first: int, ends: Sequence[int]) -> dict[str, Any]:
    """Return the values that `PagedCache.restore` needs in addition to the pages. ends: `PagedCache.ends`."""
    return {"offset": offset, "first": first, **dict(zip(_ENDS, ends, strict=True)), "layout": layout}


# The names of `PagedCache.ends` in a dump. "cold": end of the 4-bit pages; "low": end of the pages below f16.
_ENDS = (*(tier.name for tier in TIERS[: HOT - 1]), "low")


class PagedCache:
    """A cache of the keys and values of one token sequence, for all layers of the model.

    A backend calls `reserve(n)`, runs n tokens against `table`, then calls `advance(n)`. If the run of the n
    tokens failed, the backend calls `abandon()` in place of `advance(n)`.

    window: the number of tokens that a query sees; 0: all tokens
    """

    def __init__(self, pool: PagePool, policy: TierPolicy = TIERED, window: int = 0):
        self.pool, self.policy, self.window = pool, policy, window
        self.table: Any = pool.storage.new_table()
        self.pages: list[Page | None] = []  # None: the page was before the sliding window and was dropped
        self.offset = self.first = 0  # offset: number of tokens in the cache; first: number of dropped pages
        self.ends = [0] * HOT  # the pages [first, ends[tier]) are in this tier or in a lower tier
        self._until = 0  # `reserve` does nothing if the cache then has at most this number of tokens
        self._look = 0  # the number of tokens at which the next early demotion starts
        self._whole_at = 0  # while `offset` is below this value, no page is demoted
        self._begun: dict[int, tuple[range, Lower]] = {}  # source tier -> (page indexes, early demotion)
        pool.caches.add(self)

    # For backends ------------------------------------------------------------------------------

    def reserve(self, n: int) -> None:
        """Make room for n more tokens, in hot pages that no other sequence shares. If a new page is necessary
        or a page is due, demote the pages that the policy wants in a lower tier, and drop the pages before
        the sliding window."""
        if self.offset + n <= self._until:
            return
        missing = -(-(self.offset + n) // PAGE) - len(self.pages)
        self._drop_left_behind()
        self._demote_due()
        if missing > 0 and self.pool.adapt(missing):
            self._demote_due()
        self._own_the_last()
        self.pool.storage.prepare(HOT, max(missing, 0))
        for _ in range(missing):
            self._put(len(self.pages), self.pool.make())
        self._schedule()

    def advance(self, n: int) -> None:
        """Add n appended tokens to `offset`. After a chunk of a prompt (n > 1), demote the pages that are
        due, because a demotion takes little time compared with a prefill. After a single token, start the
        next demotion early if the storage can demote in the background."""
        self.offset += n
        if n > 1:
            self._demote_due()
            for tier in range(HOT, 0, -1):  # a prompt's pages start hot, then go down one tier at a time
                self.pool.compact(tier)
            self._schedule()
        elif self.pool.storage.background and self.offset >= self._look:
            self._begin_next()

    def hold(self, n: int) -> None:
        """Announce n tokens that the caller will append in several calls. The cache demotes no page until the
        n tokens are appended, so it gets the same bits as from one call with n tokens."""
        self._whole_at = 0
        self._demote_due()
        self._whole_at = self.offset + n

    @property
    def room(self) -> int:
        """Return the number of tokens that can be appended before the cache must make or demote a page;
        `retract` can remove only tokens that were appended within `room`."""
        return max(0, self._until - self.offset)

    def retract(self, n: int) -> None:
        """Remove the newest n tokens. The caller appended these tokens one by one within `room`, so no page
        was made or demoted. Demotions that started early stay valid, because they read only older pages."""
        self.offset -= n

    def abandon(self) -> None:
        """Release the pages that were reserved for a run that failed."""
        self._cut(-(-self.offset // PAGE))

    # For sessions -------------------------------------------------------------------------------

    def trim(self, n: int) -> bool:
        """Remove the newest n tokens. Not every cut is possible (see `_sound`): the method can remove more
        than n tokens, so read `offset` after the call. If the sliding window would become incomplete, or if n
        is below 0 or above `offset`, change nothing and return False."""
        left = self.offset - n
        if n < 0 or left < 0:
            return False
        left = self._sound(left)
        if self.first and left < self.first * PAGE + self.window - 1:
            return False
        self._stop()
        self.offset = left
        self._cut(-(-left // PAGE))
        return True

    def fork(self) -> "PagedCache":
        """Return a second cache with the same tokens. At first the two caches share all pages. A cache makes
        its own copy of a shared page before it writes tokens into the page."""
        other = PagedCache(self.pool, self.policy, self.window)
        for i, page in enumerate(self.pages[: -(-self.offset // PAGE)]):
            if page is not None:
                page.users += 1
                other.table.set(i, page.number, page.tier)
            other.pages.append(page)
        other.offset, other.first, other.ends = self.offset, self.first, list(self.ends)
        self._until = other._until = self.offset
        other._look = self._look
        self.table.share(other.table)
        return other

    def clear(self) -> None:
        """Release all pages; the cache is then empty."""
        self._stop()
        self._cut(0)
        self.offset = self.first = 0

    def __del__(self) -> None:
        if hasattr(self, "_begun"):
            self.pool.abandon(self.pages, [result for _, result in self._begun.values()])

    def dump(self) -> Dump:
        """Return the pages' bytes, the oldest page first, and the values for `restore`."""
        pages = list(self.dumped_pages())
        facts = facts_of(self.pool.storage.layout, self.offset, self.first, self.ends)
        return Dump(facts, sum(nbytes for _, _, nbytes, _ in pages), (page() for *_, page in pages))

    def dumped_pages(self) -> Iterator[tuple[int, int, int, Callable[[], Bytes]]]:
        """Yield (index, tier, byte count, function that returns the bytes) of each page, the oldest first."""
        self.table.flush()
        for i, page in enumerate(self.pages[: -(-self.offset // PAGE)]):
            if page is not None:
                dump = partial(self.pool.storage.dump, page.number, page.tier)
                yield i, page.tier, self.pool.sizes[page.tier], dump

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        """Fill an empty cache from the result of `dump`. Raises ValueError if the values in `facts`
        contradict one another or name another byte layout, or another of page_file.UNUSABLE for bad values.

        read: a function of n that returns the next n bytes of the dump
        """
        offset, first, *ends = (facts[name] for name in ("offset", "first", *_ENDS))
        end = -(-offset // PAGE)
        rising = [0, *ends, offset // PAGE]
        sound = 0 <= first <= end and rising == sorted(rising)
        if not sound or facts.get("layout") != self.pool.storage.layout:
            raise ValueError(f"no cache has {facts}")
        self.pages, self.first, self.ends = [None] * first, first, ends
        for i in range(first, end):
            tier = sum(i >= end for end in ends)
            self._put(i, self.pool.load(read(self.pool.sizes[tier]), tier))
        self._until = self.offset = offset

    @property
    def nbytes(self) -> int:
        return sum(_bytes_by_tier(self)) + self.table.nbytes

    def stats(self) -> KVStats:
        bounds = [PAGE * max(end, self.first) for end in (0, *self.ends)] + [self.offset]
        tokens = tuple(stop - start for start, stop in pairwise(bounds))
        pages = sum(page is not None for page in self.pages)
        f16 = pages * self.pool.sizes[HOT]
        return KVStats(self.policy.name, tokens, self.nbytes, f16, _bytes_by_tier(self))

    # Inside -------------------------------------------------------------------------------------

    def refresh_page_numbers(self) -> None:
        """Update the page table after the pool has renumbered pages."""
        for i, page in enumerate(self.pages):
            if page is not None:
                self.table.set(i, page.number, page.tier)

    def _put(self, i: int, page: Page) -> None:
        if i == len(self.pages):
            self.pages.append(page)
        else:
            old, self.pages[i] = self.pages[i], page
            if old is not None:
                self.pool.release(old)
        self.table.set(i, page.number, page.tier)

    def _drop_left_behind(self) -> None:
        keep = self.window - 1 + SLACK
        while self.window and (self.first + 1) * PAGE <= self.offset - keep:
            self._stop()  # a demotion that is not finished can read this page, so discard it first
            page, self.pages[self.first] = self.pages[self.first], None
            if page is not None:
                self.pool.release(page)
            self.table.clear(self.first)
            self.first += 1

    def _policy_ends(self, offset: int) -> list[int]:
        """Return the page indexes for `self.ends` (one for each tier below hot) that the pool's policy asks
        for at this offset. No index is smaller than the present one."""
        wanted, full = self.pool.policy(self.policy).counts(offset), self.offset // PAGE
        return [max(end, min(n, full)) for end, n in zip(self.ends, wanted, strict=True)]

    def _demote_due(self) -> None:
        if self.offset < self._whole_at:
            return
        due = self._policy_ends(self.offset)
        for tier in reversed(range(HOT)):  # from hot downwards, because a page can go down several tiers
            self._lower(tier + 1, range(max(self.ends[tier], self.first), due[tier]))
            self.ends[tier] = due[tier]

    def _lower(self, tier: int, which: range) -> None:
        """Convert the pages with the indexes `which` from `tier` to the next lower tier, a few pages at a
        time. Use the result of an early demotion of exactly these pages; discard another early demotion."""
        begun, result = self._begun.pop(tier, (None, None))
        if begun == which and result:
            self._take(which, result())
            return
        self._discard(result)
        while which:
            some, which = which[: (n := self.pool.at_once(tier))], which[n:]
            self._take(some, self.pool.demote(_kept_pages(self.pages[some.start : some.stop]))())
            self.ends[tier - 1] = some.stop

    def _take(self, which: range, pages: Sequence[Page]) -> None:
        for i, page in zip(which, pages, strict=True):
            self._put(i, page)

    def _own_the_last(self) -> None:
        """Copy the last page if another sequence shares it, because new tokens will be written into this
        page. If no other sequence shares the page, forget the version of the page in a lower tier, because
        new tokens make that version out of date."""
        i = self.offset // PAGE
        page = self.pages[i] if i < len(self.pages) and self.offset % PAGE else None
        self.pool.release_abandoned()  # a deleted cache can still share the page
        if page is not None and page.users > 1:
            self._put(i, self.pool.copy(page))
        elif page is not None:
            page.lower = None

    def _schedule(self) -> None:
        """Compute at how many tokens `reserve` has work again, and `advance` starts an early demotion."""
        due = self.pool.policy(self.policy).next_change(self.offset)
        self._until = min(PAGE * len(self.pages), due)
        self._look = due - AHEAD

    def _sound(self, left: int) -> int:
        """Return how many of the oldest tokens a trim can keep, at most `left`. After the trim, the last page
        must be hot or full, and no lowest-tier page can hold one of the newest `policy.lengths[0]` tokens."""
        if left == self.offset:
            return left
        if left // PAGE < self.ends[-1]:
            left -= left % PAGE
        newest = max(0, left - self.policy.lengths[0]) // PAGE  # index: the page of the oldest hot token
        return newest * PAGE if newest < self.ends[0] else left

    def _cut(self, end: int) -> None:
        """Release the pages from index `end` on."""
        for i in range(len(self.pages) - 1, end - 1, -1):
            page = self.pages.pop()
            if page is not None:
                self.pool.release(page)
                self.table.clear(i)
        self.ends = [min(e, end) for e in self.ends]
        self.first = min(self.first, end)
        self._until = self._look = self._whole_at = 0

    # Early demotions --------------------------------------------------------------------------------

    def _begin_next(self) -> None:
        """Start the demotions that must be finished within the next AHEAD tokens."""
        self._look = EVERYTHING  # start no other demotion early until `_schedule` sets a new value
        # for each tier below hot: the index after the last page that is at most one tier higher
        there = [*self.ends[1:], len(self.pages)]
        for tier, due in enumerate(self._policy_ends(self.offset + AHEAD), 1):
            which = range(max(self.ends[tier - 1], self.first), min(due, there[tier - 1]))
            if which and tier not in self._begun:
                self._begun[tier] = which, self.pool.demote(_kept_pages(self.pages[which.start : which.stop]))

    def _stop(self) -> None:
        """Discard the demotions that were started early."""
        while self._begun:
            self._discard(self._begun.popitem()[1][1])

    def _discard(self, result: Lower | None) -> None:
        for page in result() if result else ():
            self.pool.release(page)


def held_bytes(caches: Collection[Any]) -> int:
    """Return the bytes of several caches, paged or not. The bytes of a shared page are added only once."""
    paged = [cache for cache in caches if isinstance(cache, PagedCache)]
    pages = {
        id(page): cache.pool.sizes[page.tier] for cache in paged for page in cache.pages if page is not None
    }
    others = sum(cache.nbytes for cache in caches if not isinstance(cache, PagedCache))
    return sum(pages.values()) + sum(cache.table.nbytes for cache in paged) + others


def _kept_pages(pages: Sequence[Page | None]) -> list[Page]:
    return [page for page in pages if page is not None]


@contextmanager
def room_for(caches: Sequence[PagedCache], n: int) -> Iterator[None]:
    """Reserve room for n more tokens in each cache. If the block ends without an exception, add n to the
    number of tokens of each cache. If the block raises an exception, release the reserved pages."""
    try:
        for cache in caches:
            cache.reserve(n)
        yield
    except BaseException:
        for cache in caches:
            cache.abandon()
        raise
    for cache in caches:
        cache.advance(n)


def _bytes_by_tier(cache: PagedCache) -> tuple[int, ...]:
    """Return the bytes of the cache's pages, by tier."""
    held = [page.tier for page in cache.pages if page is not None]
    return tuple(held.count(tier) * size for tier, size in enumerate(cache.pool.sizes))
