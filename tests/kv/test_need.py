"""What a request will need at most, against caches that grow page by page: never less, and not much more."""

import random
from dataclasses import replace

import pytest

from ruvmlx.kv.cache import PagedCache
from ruvmlx.kv.need import CacheShape, Growth
from ruvmlx.kv.policy import F16, TIERED, TierPolicy, tighten
from ruvmlx.kv.pool import PagePool
from tests.oracles.plain_storage import PlainStorage

SMALL = TierPolicy("tiered", (64, 128))
POLICIES = [F16, SMALL, TIERED, tighten(TIERED, 3), tighten(TIERED, 5)]


class CountingStorage(PlainStorage):
    """Knows the most bytes that were ever there, lower pages that are being made included."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def _add(self, tier, content):
        number = super()._add(tier, content)
        self.most = max(self.most, sum(self.page_bytes(tier) for tier, _ in self.pages.values()))
        return number


def new_pool(policy: TierPolicy, growths: list[Growth], window: int = 0) -> PagePool:
    """Its budget is what these need. Without it more pages would be demoted at once."""
    pool = PagePool(CountingStorage(), pressure=lambda: 0.0)
    pool.budget = CacheShape(policy, pool.sizes, window).together(growths)
    return pool


def append(cache: PagedCache, tokens: int) -> None:
    """One call, as a backend does it."""
    cache.reserve(tokens)
    for i in range(cache.offset, cache.offset + tokens):
        cache.pool.storage.write(cache, i, i)
    cache.advance(tokens)


def read(cache: PagedCache, tokens: int, chunk: int) -> None:
    """A prompt from where the cache is, in chunks."""
    while cache.offset < tokens:
        append(cache, min(chunk, tokens - cache.offset))


def write(caches: list[PagedCache], ends: list[int]) -> None:
    """Replies, a token each in turn. One that has ended stays as it was."""
    while any(cache.offset < end for cache, end in zip(caches, ends, strict=True)):
        for cache, end in zip(caches, ends, strict=True):
            if cache.offset < end:
                append(cache, 1)


def some_growth(rng: random.Random) -> Growth:
    prompt = rng.choice([1, 5, 63, 64, 65, 300, 319, 320, 700, rng.randrange(1, 3000)])
    reply = rng.choice([1, 2, 64, 100, rng.randrange(1, 900)])
    return Growth(prompt, prompt + reply, rng.choice([1, 1, 2, 4]), rng.choice([64, 128, 512]))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{min(p.lengths[1], 9999)}")
@pytest.mark.parametrize("window", [0, 300])
def test_nothing_ever_holds_more(policy, window):
    rng, slack = random.Random(f"{policy.lengths} {window}"), []
    for _ in range(25):
        growth = some_growth(rng)
        pool = new_pool(policy, [growth], window)
        first = PagedCache(pool, policy, window)
        read(first, growth.prompt, growth.chunk)
        caches = [first, *(first.fork() for _ in range(growth.replies - 1))]
        ends = [growth.end, *(rng.randrange(growth.prompt, growth.end + 1) for _ in caches[1:])]
        rng.shuffle(ends)
        write(caches, ends)
        assert pool.storage.most <= pool.budget and pool.level == 0, growth
        slack.append((pool.budget - pool.storage.most) / growth.replies)
    assert sorted(slack)[len(slack) // 2] <= 6 * 400  # of most: a demotion, a chunk, and the last page


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{min(p.lengths[1], 9999)}")
def test_requests_with_one_prompt_hold_it_once(policy):
    """Each later one starts from the first one's pages at a random moment of its reply."""
    rng = random.Random(str(policy.lengths))
    for _ in range(15):
        growth = replace(some_growth(rng), replies=1)
        pool = new_pool(policy, [growth] * 3)
        caches, ends = [PagedCache(pool, policy)], [growth.end]
        read(caches[0], growth.prompt, growth.chunk)
        for _ in range(2):
            write(caches, [rng.randrange(cache.offset, growth.end + 1) for cache in caches])
            fork = caches[0].fork()
            fork.trim(fork.offset - (growth.prompt - 1))
            read(fork, growth.prompt, growth.chunk)
            caches.append(fork)
            ends.append(rng.randrange(growth.prompt, growth.end + 1))
        write(caches, ends)
        shape = CacheShape(policy, pool.sizes)
        assert pool.storage.most <= pool.budget and pool.level == 0, growth
        assert shape.together([growth] * 3) <= 3 * shape.peak(growth) + 2 * 3 * 400


def test_a_shared_prompt_counts_once():
    """Four replies to 2,000 tokens need little more than one; caches that share nothing need all."""
    shape, growth = CacheShape(F16, (100, 200, 400)), Growth(2000, 2100)
    one, four = shape.peak(growth), shape.peak(replace(growth, replies=4))
    assert one == 33 * 400 and four == (31 + 4 * 2) * 400
    assert replace(shape, shares=False).peak(replace(growth, replies=4)) == 4 * one
    assert shape.together([growth] * 4) == four


def test_small_chunks_and_lower_precision_need_less():
    sizes, growth = (100, 200, 400), Growth(4000, 4400)
    needs = [CacheShape(tighten(TIERED, level), sizes).peak(growth) for level in range(6)]
    assert needs == sorted(needs, reverse=True) and needs[0] > 1.2 * needs[-1]
    least = CacheShape(tighten(TIERED, 5), sizes)
    by_chunk = [least.peak(replace(growth, chunk=chunk)) for chunk in (512, 256, 128, 64)]
    assert by_chunk == sorted(by_chunk, reverse=True) and by_chunk[0] > by_chunk[-1]
