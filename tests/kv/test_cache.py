"""Page tables, tiers, trims and forks, against a plain list of tokens."""

import random
import threading

import pytest

from ruvmlx.kv.cache import SLACK, PagedCache
from ruvmlx.kv.policy import F16, FOUR_BIT_LEVEL, TIERED, TierPolicy, tighten
from ruvmlx.kv.pool import PagePool
from ruvmlx.tiers import COLD, HOT, PAGE, WARM
from tests.oracles.plain_storage import PlainStorage

SMALL = TierPolicy("tiered", (128, 256))


class Walker:
    """A cache beside the list of tokens that it should hold."""

    def __init__(self, cache: PagedCache, tokens=()):
        self.cache, self.tokens, self.storage = cache, list(tokens), cache.pool.storage

    def append(self, tokens) -> None:
        self.cache.reserve(len(tokens))
        for i, token in enumerate(tokens):
            self.storage.write(self.cache, self.cache.offset + i, token)
        self.cache.advance(len(tokens))
        self.tokens += tokens

    def fail(self, n: int) -> None:
        """A call that breaks half way."""
        self.cache.reserve(n)
        for i in range(n // 2):
            self.storage.write(self.cache, self.cache.offset + i, -1)
        self.cache.abandon()

    def trim(self, n: int) -> bool:
        done = self.cache.trim(n)
        if done:
            del self.tokens[self.cache.offset :]
        return done

    def check(self) -> None:
        cache, held = self.cache, self.storage.read(self.cache)
        assert cache.offset == len(self.tokens)
        visible = max(0, cache.offset - cache.window + 1) if cache.window else 0
        assert held[visible:] == self.tokens[visible:]
        tiers = [page.tier for page in cache.pages if page is not None]
        assert tiers == sorted(tiers)
        rows = [(page.number, page.tier) for page in cache.pages if page is not None]
        assert list(cache.table.rows.values()) == rows
        stats = cache.stats()
        assert sum(stats.tokens) == cache.offset - PAGE * cache.first


def new_pool(budget: int = 0, pressure=lambda: 0.0) -> PagePool:
    return PagePool(PlainStorage(), budget, pressure)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_survive_failures_trims_forks_and_closings(seed, window):
    """Appends, failures, trims, forks and closings at random points: the tokens are always the right ones,
    and no page is lost or freed twice."""
    pool, rng, next_token = new_pool(), random.Random(seed), iter(range(10**9))
    walkers = [Walker(PagedCache(pool, SMALL, window))]
    for _ in range(400):
        walker = rng.choice(walkers)
        match rng.choice(("chunk", "tokens", "tokens", "trim", "fork", "fail", "close")):
            case "chunk":
                walker.append([next(next_token) for _ in range(rng.randrange(1, 200))])
            case "tokens":
                for _ in range(rng.randrange(90)):
                    walker.append([next(next_token)])
            case "trim":
                walker.trim(rng.randrange(rng.choice((3, 80, 2000))))
            case "fork" if len(walkers) < 5:
                walkers.append(Walker(walker.cache.fork(), walker.tokens))
            case "fail":
                walker.fail(rng.randrange(1, 150))
            case "close" if len(walkers) > 1:
                walkers.remove(walker)
                walker.cache.clear()
        for each in walkers:
            each.check()
        assert len(pool.storage.pages) == sum(pool.pages)
    for walker in walkers:
        walker.cache.clear()
    assert pool.storage.pages == {} and pool.pages == [0, 0, 0] and pool.nbytes == 0


@pytest.mark.parametrize("policy", [TIERED, SMALL, TierPolicy("tiered", (64, 64)), F16])
@pytest.mark.parametrize("chunk", [1, 64, 100, 256])
def test_tiers_follow_from_the_age(policy, chunk):
    """Before a token is appended at offset o, a page whose newest token is `hot` or more behind is warm."""
    walker = Walker(PagedCache(new_pool(), policy))
    while walker.cache.offset < 2600:
        start = walker.cache.offset
        walker.append(list(range(start, start + chunk)))
        now = start if chunk == 1 else walker.cache.offset  # a prompt is demoted when it has been read
        for j, page in enumerate(walker.cache.pages):
            age = now + 1 - PAGE * (j + 1)
            hot, warm = policy.lengths
            assert page.tier == (COLD if age >= warm else WARM if age >= hot else HOT)


def test_bytes_of_a_policy_are_those_of_a_cache():
    pool = new_pool()
    walker = Walker(PagedCache(pool, SMALL))
    for token in range(1000):
        assert (
            SMALL.bytes(walker.cache.offset, pool.sizes)
            >= sum(walker.cache.stats().tier_bytes) - pool.sizes[HOT]
        )
        walker.append([token])
    walker.cache.reserve(1)
    assert abs(SMALL.bytes(1000, pool.sizes) - sum(walker.cache.stats().tier_bytes)) <= pool.sizes[HOT]


def test_begun_demotions_are_used():
    """Decoding token by token finds the next lower pages made; none is made twice."""
    pool = new_pool()
    walker = Walker(PagedCache(pool, SMALL))
    calls = []
    demote = pool.storage.demote
    pool.storage.demote = lambda pages, tier: calls.append((walker.cache.offset, tier)) or demote(pages, tier)
    walker.append(list(range(400)))
    calls.clear()
    for token in range(400, 1000):
        walker.append([token])
    calls = [call for call in calls if call[0] != 400]  # the chunk's own
    assert all(offset % PAGE == PAGE - 1 - 32 for offset, _ in calls)
    assert len(calls) == 2 * len({offset for offset, _ in calls})  # one to warm, one to cold


@pytest.mark.parametrize("window", [0, 100, 257])
def test_no_page_is_freed_under_a_demotion(window):
    """However often demotions are begun, and whatever the window drops meanwhile."""
    pool = new_pool()
    walker = Walker(PagedCache(pool, SMALL, window))
    for token in range(1500):
        walker.cache._look = 0
        walker.append([token])
    walker.check()
    walker.cache.clear()
    assert pool.storage.pages == {} and pool.storage.reading == []


def test_the_garbage_collector_touches_no_page():
    """It runs in any thread, in the middle of any work: it frees nothing, and awaits no demotion."""
    pool = new_pool()
    last = [Walker(PagedCache(pool, SMALL))]
    for i in range(4 * PAGE - 10):  # demotions begin half a page ahead
        last[0].append([i])
    pages, begun = dict(pool.storage.pages), len(last[0].cache._begun)
    collector = threading.Thread(target=last.clear)
    collector.start()
    collector.join()
    assert begun and pool.storage.pages == pages
    assert pool.pages == [0, 0, 0] and pool.storage.pages == {}


def test_a_trim_leaves_pages_of_full_precision_behind_it():
    """A cut inside a page of 8 or 4 bits goes back to its start, one near cold pages to where `hot` tokens
    more will be read again."""
    walker = Walker(PagedCache(new_pool(), TierPolicy("tiered", (128, 512))))
    walker.append(list(range(1000)))
    walker.append([1000])
    cold, low = (PAGE * end for end in walker.cache.ends)
    assert walker.trim(walker.cache.offset - (low + 5)) and walker.cache.offset == low + 5
    assert walker.trim(10) and walker.cache.offset == low - PAGE
    assert walker.trim(walker.cache.offset - (cold + 1)) and walker.cache.offset <= cold - 128 + PAGE
    walker.check()


def test_a_window_that_would_not_be_whole_is_not_trimmed():
    walker = Walker(PagedCache(new_pool(), SMALL, window=100))
    for token in range(2000):
        walker.append([token])
    before = walker.cache.stats()
    assert not walker.trim(SLACK + 200) and walker.cache.stats() == before
    assert walker.trim(50)


@pytest.mark.parametrize("more", [0, 1, PAGE - 2, PAGE - 1])
def test_a_trim_within_the_slack_leaves_the_window_whole(more):
    """The last 256 tokens can be removed, at every place in a page and after every removal."""
    walker = Walker(PagedCache(new_pool(), F16, window=100))
    for token in range(20 * PAGE + more):
        walker.append([token])
    assert walker.cache.first and walker.trim(SLACK)
    walker.check()


def test_a_trim_goes_as_far_as_the_window_is_whole():
    """The query of the next token sees 99 before it: all of them are there, or nothing is trimmed."""
    walker = Walker(PagedCache(new_pool(), F16, window=100))
    for token in range(20 * PAGE):
        walker.append([token])
    dropped = next(i for i, page in enumerate(walker.cache.pages) if page is not None) * PAGE
    whole = dropped + 99
    assert not walker.trim(walker.cache.offset - whole + 1)
    assert walker.trim(walker.cache.offset - whole) and walker.cache.offset == whole
    walker.check()


def test_a_fork_copies_only_what_it_writes():
    pool = new_pool()
    one = Walker(PagedCache(pool, F16))
    one.append(list(range(100)))
    two = Walker(one.cache.fork(), one.tokens)
    assert sum(pool.pages) == 2
    two.append([-1])
    assert sum(pool.pages) == 3
    one.append([-2])
    assert sum(pool.pages) == 3
    one.check(), two.check()


def test_forks_share_demoted_pages():
    """A page that several sequences hold is demoted once; what one writes after a trim is its own."""
    pool = new_pool()
    one = Walker(PagedCache(pool, SMALL))
    one.append(list(range(120)))
    others = [Walker(one.cache.fork(), one.tokens) for _ in range(3)]
    for i in range(100):
        for walker in (one, *others):
            walker.append([1000 + i])
    assert [walker.cache.pages[0] for walker in others] == 3 * [one.cache.pages[0]]
    assert pool.pages[WARM] == 1
    assert one.cache.pages[0].tier == WARM and one.cache.pages[0].users == 4
    one.check(), [walker.check() for walker in others]


def test_pressure_tightens_and_lets_go():
    """Old tokens go to 4 bits at once, before hot shrinks; when memory returns, new pages live longer again.
    f16 is left alone."""
    level = [0.95]
    pool = new_pool(pressure=lambda: level[0])
    cache = Walker(PagedCache(pool, TIERED))
    cache.append(list(range(1500)))
    tokens = cache.cache.stats().tokens
    assert tokens[COLD] > 1000 and tokens[WARM] == 0 and tokens[HOT] >= 256
    cache.append(list(range(1500, 1600)))
    assert pool.level == FOUR_BIT_LEVEL + 1
    level[0] = 0.1
    for token in range(1000):
        cache.append([token])
    assert pool.level == 0
    assert tighten(F16, 5) is F16


def test_a_budget_bounds_the_bytes():
    pool = new_pool(budget=6000)
    walker = Walker(PagedCache(pool, TIERED))
    for start in range(0, 2000, 50):
        walker.append(list(range(start, start + 50)))
    unbounded = TIERED.bytes(2000, pool.sizes)
    assert pool.nbytes <= 6000 + 400 < unbounded
    walker.check()


def test_a_page_that_an_abandoned_sequence_shared_is_not_copied():
    pool = new_pool()
    walker = Walker(PagedCache(pool, SMALL))
    walker.append([1, 2, 3])
    fork = walker.cache.fork()
    made = pool.storage.made
    del fork
    walker.append([4])
    assert pool.storage.made == made and sum(pool.pages) == 1
