"""Pages as MLX arrays: numbers, bytes and growth."""

import random
import threading

import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels import demote
from ruvmlx.backends.mlx.storage import MIN_GROWTH_PAGES, MLXStorage, OpenPages
from ruvmlx.kv.cache import PagedCache
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.kv.pool import PagePool
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import COLD, HOT, PAGE, WARM
from tests.models.shapes import Shape

SHAPE = Shape(n_layers=3, n_heads=6, n_kv_heads=2, head_dim=80)
SMALL = TierPolicy("tiered", (64, 128))


@pytest.fixture
def storage():
    return MLXStorage(SHAPE.config())


def rows(seed: int, tokens: int = PAGE) -> mx.array:
    """uint8 [n_kv_heads, 2, tokens, 2 * head_dim]"""
    values = np.random.default_rng(seed).normal(size=(2, 2, tokens, 80)).astype(np.float16)
    return mx.array(values.view(np.uint8))


def page(storage, layer: int, number: int, tier: int) -> np.ndarray:
    return np.array(storage.pools(layer)[tier][number])


def fill_page(storage, seed: int) -> int:
    number = storage.make(HOT)
    for layer in range(3):
        storage.write(layer, [number], 0, rows(10 * seed + layer))
    return number


def test_bytes_are_those_of_the_pages(storage):
    assert [storage.page_bytes(tier) for tier in (COLD, WARM, HOT)] == [
        3 * 2 * size for size in (64 * 80 + 512, 128 * 80 + 256, 256 * 80)
    ]
    assert storage.nbytes == 0
    for tier in (COLD, WARM, HOT):
        storage.make(tier)
    assert storage.nbytes == sum(
        storage.page_bytes(tier) * MIN_GROWTH_PAGES[tier] for tier in (COLD, WARM, HOT)
    )


def test_write_and_copy(storage):
    """A copy has the bytes of its page, in every layer, and its own life."""
    one = fill_page(storage, 1)
    storage.write(1, [one], 7, rows(5, 3))
    two = storage.copy(one)
    storage.write(2, [two], 63, rows(6, 1))
    for layer, same in ((0, True), (1, True), (2, False)):
        assert np.array_equal(page(storage, layer, one, HOT), page(storage, layer, two, HOT)) == same
    want = np.array(rows(11))
    want[:, :, 7:10] = np.array(rows(5, 3))
    np.testing.assert_array_equal(page(storage, 1, two, HOT), want.reshape(2, -1))


def test_demotion_is_the_kernels(storage):
    """hot -> warm -> cold in every layer; the sources stay."""
    pages = [fill_page(storage, seed) for seed in range(1, 7)]
    warm = list(storage.demote(pages, HOT)())
    cold = list(storage.demote([warm[4], warm[1]], WARM)())
    for layer in range(3):
        for i, number in enumerate(pages):
            hot = rows(10 * (i + 1) + layer).reshape(1, 2, -1)
            np.testing.assert_array_equal(page(storage, layer, number, HOT), hot[0])
            lower = demote.demote_ops(hot, 80, WARM)
            np.testing.assert_array_equal(page(storage, layer, warm[i], WARM), lower[0])
            if i in (4, 1):
                at = cold[(4, 1).index(i)]
                np.testing.assert_array_equal(
                    page(storage, layer, at, COLD), demote.demote_ops(lower, 80, COLD)[0]
                )


def test_growth_and_return(storage):
    """Pools grow in steps, keep what they hold, use low numbers first, and go when nobody has a page."""
    first = fill_page(storage, 1)
    before = page(storage, 0, first, HOT)
    numbers = [first] + [storage.make(HOT) for _ in range(10)]
    assert numbers == list(range(11)) and storage.pools(0)[HOT].shape[0] == 12
    np.testing.assert_array_equal(page(storage, 0, first, HOT), before)
    storage.free(3, HOT), storage.free(1, HOT)
    assert storage.make(HOT) == 1
    for number in numbers:
        if number != 3:
            storage.free(number, HOT)
    assert storage.in_use == 0
    storage.make(HOT)
    assert storage.pools(0)[HOT].shape[0] == MIN_GROWTH_PAGES[HOT]


def test_growth_is_geometric():
    """A pool that grows a page at a time is copied a number of times that grows with the logarithm, and never
    holds more than a quarter, or LEAST pages, to spare."""
    storage = MLXStorage(Shape(n_layers=1, n_kv_heads=1, head_dim=64).config())
    sizes = []
    for n in range(1, 2001):
        storage.make(COLD)
        size = len(storage.pools(0)[COLD])
        assert size - n <= max(MIN_GROWTH_PAGES[COLD], n / 4)
        sizes += [size] * (size not in sizes)
    assert len(sizes) < 25
    grown = MLXStorage(Shape(n_layers=1, n_kv_heads=1, head_dim=64).config())
    grown.prepare(COLD, 700)
    assert len(grown.pools(0)[COLD]) == 700 and [grown.make(COLD) for _ in range(3)] == [0, 1, 2]


def test_growth_gives_back_what_it_leaves_behind(monkeypatch):
    """One evaluation and one emptied buffer cache each time, however many layers."""
    calls = []
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append("clear"))
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *a: (calls.append(f"eval {len(a)}"), evaluate(*a)))
    storage = MLXStorage(Shape(n_layers=16, n_kv_heads=4, head_dim=128).config())
    storage.make(WARM)
    assert calls == ["eval 16", "clear"]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(MIN_GROWTH_PAGES[WARM]):
        storage.make(WARM)
    assert calls == ["eval 16", "clear"] * 2
    old = storage.nbytes // 2
    assert mx.get_active_memory() - before <= 1.05 * old
    assert mx.get_peak_memory() - before <= 2.05 * old


def test_compacting_gives_back_what_a_prompt_left(storage):
    """What a prompt filled and left goes back; the pages in use move to the front, with their bytes."""
    numbers = [fill_page(storage, seed) for seed in range(40)]
    kept = {number: [page(storage, layer, number, HOT) for layer in range(3)] for number in (5, 17, 39)}
    assert storage.compact(HOT) == {}
    for number in numbers:
        if number not in kept:
            storage.free(number, HOT)
    moved = storage.compact(HOT)
    assert moved == {5: 0, 17: 1, 39: 2} and len(storage.pools(0)[HOT]) == 3 + MIN_GROWTH_PAGES[HOT]
    for old, new in moved.items():
        for layer in range(3):
            np.testing.assert_array_equal(page(storage, layer, new, HOT), kept[old][layer])
    assert storage.make(HOT) == 3 and storage.compact(HOT) == {}


@pytest.mark.parametrize("what", ["copy", "demote", "load"])
def test_work_that_fails_keeps_no_page(storage, monkeypatch, what):
    """The GPU fails in the middle. The numbers are free again."""
    number = fill_page(storage, 1)
    data, used = storage.dump(number, HOT), storage.in_use

    def fail(*_):
        raise RuntimeError("device lost")

    work = {
        "copy": lambda: storage.copy(number),
        "demote": lambda: storage.demote([number, number], HOT),
        "load": lambda: storage.load(data, HOT),
    }
    with monkeypatch.context() as m:
        m.setattr(mx, "array", fail)
        m.setattr("ruvmlx.backends.mlx.storage.demote", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            work[what]()
    assert storage.in_use == used
    work[what]()


class PageList:
    """What a pool sees of a cache."""

    def __init__(self, pool, pages):
        self.pages, self.offset, self.policy = pages, PAGE * len(pages), SMALL
        pool.caches.add(self)

    def refresh_page_numbers(self):
        pass


@pytest.mark.parametrize("is_known", [True, False])
def test_pages_of_a_deleted_cache_are_renumbered_too(storage, is_known):
    """Their cache was deleted in another thread, so they wait for their release. is_known: False if a page is
    in no list yet; then nothing moves."""
    pool = PagePool(storage, pressure=lambda: 0.0)
    pages = [pool.make() for _ in range(80)]
    kept, gone = PageList(pool, pages[70:]), pages[60:65]
    for each in pages[: 60 if is_known else 59] + pages[65:70]:
        pool.release(each)
    pool.abandon(gone, [])
    other = threading.Thread(target=pool.compact, args=(HOT,))  # only the pages' own thread releases them
    other.start()
    other.join()
    numbers = [each.number for each in (*gone, *kept.pages)]
    assert numbers == (list(range(15)) if is_known else [*range(60, 65), *range(70, 80)])
    new = [pool.make() for _ in range(40)]
    assert len({each.number for each in (*new, *kept.pages)}) == 50


@pytest.mark.parametrize("limit", [0, 1], ids=["all layers together", "layer by layer"])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_pools_that_cannot_shrink_stay(storage, monkeypatch, limit, fails_at):
    """The GPU has no memory for a smaller pool. Its next pools are sound."""
    numbers = [fill_page(storage, seed) for seed in range(40)]
    for number in numbers[:30]:
        storage.free(number, HOT)
    want = [[page(storage, layer, number, HOT) for layer in range(3)] for number in numbers[30:]]
    storage.limit, calls, evaluate = limit, [], mx.eval

    def fail_once(*arrays):
        calls.append(arrays)
        if len(calls) == fails_at:
            raise RuntimeError("[metal::malloc] no memory")
        evaluate(*arrays)

    with monkeypatch.context() as m:
        m.setattr(mx, "eval", fail_once)
        moved = storage.compact(HOT)
    assert (moved == {}) == (len(calls) >= fails_at)
    now = [moved.get(number, number) for number in numbers[30:]]
    found = [[page(storage, layer, number, HOT) for layer in range(3)] for number in now]
    np.testing.assert_array_equal(found, want)
    storage.limit = 0
    again = storage.compact(HOT)
    found = [[page(storage, layer, again.get(number, number), HOT) for layer in range(3)] for number in now]
    np.testing.assert_array_equal(found, want)


def test_rows_over_several_pages(storage):
    """From the middle of a page, over whole pages with gaps between their numbers, into another."""
    numbers = [storage.make(HOT) for _ in range(6)]
    order = [numbers[i] for i in (4, 0, 1, 5, 2)]
    new = rows(3, 20 + 3 * PAGE + 9)
    for layer in range(3):
        storage.write(layer, order, PAGE - 20, new)
    want = np.concatenate([np.zeros((2, 2, PAGE - 20, 160), np.uint8), np.array(new)], axis=2)
    for i, number in enumerate(order):
        held = page(storage, 1, number, HOT).reshape(2, 2, PAGE, 160)
        here = want[:, :, i * PAGE : (i + 1) * PAGE]
        np.testing.assert_array_equal(held[:, :, : here.shape[2]], here)
    storage.write(0, [numbers[3]], 5, rows(4, 7))
    np.testing.assert_array_equal(
        page(storage, 0, numbers[3], HOT).reshape(2, 2, PAGE, 160)[:, :, 5:12], rows(4, 7)
    )


def test_writes_are_in_place(storage):
    """A token's rows cost their own bytes, not a copy of the pool."""
    number = fill_page(storage, 1)
    for _ in range(40):
        storage.make(HOT)
    mx.eval(*storage.arrays())
    new = rows(2, 1)
    mx.eval(new)
    for at in range(5):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for layer in range(3):
            storage.write(layer, [number], at, new)
        mx.eval(*storage.arrays())
        assert mx.get_peak_memory() - before < storage.pools(0)[HOT].nbytes


def test_an_open_page_is_empty_or_what_the_pool_holds(storage):
    """A table's open page is empty, or what the pool holds; it goes back when it is full, or when asked."""
    table, other = storage.new_table(), storage.new_table()
    for i in range(2):
        table.set(i, storage.make(HOT), HOT)
    pages, index = table.open_page_at(0)
    assert index == 0 and not np.array(pages.arrays[2]).any()
    made = [
        mx.array(np.random.default_rng(i).integers(0, 255, (1, 2, 2, PAGE, 160), np.uint8)) for i in range(3)
    ]
    table.fill(63, OpenPages(made), 0)
    assert table.open_page_at(5)[0].arrays is made
    other.set(0, table.hot_page(0), HOT)
    table.share(other)
    assert other.open_page_at(5)[0].arrays is made
    blank, _ = table.open_page_at(64)  # the first page is full
    assert not np.array(blank.arrays[0]).any()
    for layer in range(3):
        np.testing.assert_array_equal(
            page(storage, layer, table.hot_page(0), HOT), np.array(made[layer]).reshape(2, -1)
        )
        np.testing.assert_array_equal(table.open_page_at(9)[0].arrays[layer], made[layer])  # after a trim
    several = OpenPages([mx.concatenate([x, x + 1]) for x in made])
    np.testing.assert_array_equal(several.of(1)[0], made[0] + 1)
    table.fill(9, several, 1)
    table.flush()
    np.testing.assert_array_equal(
        page(storage, 0, table.hot_page(0), HOT), np.array(made[0] + 1).reshape(2, -1)
    )


def test_a_table_lists_pages_by_tier(storage):
    """Pages by tier, whole or as a shorter sequence sees them; gone ones keep the places right."""
    table = storage.new_table()
    for i, (number, tier) in enumerate([(9, COLD), (4, WARM), (5, WARM), (0, HOT), (7, HOT)]):
        table.set(i, number, tier)
    view = table.view(300)
    assert view.by_tier == [[9], [4, 5], [0, 7]]
    assert table.view(256).by_tier[HOT] == [0]
    assert table.hot_page(255) == 0 and table.hot_page(256) == 7
    with pytest.raises(ValueError, match="position 64"):
        table.hot_page(100)
    table.clear(0), table.clear(1)
    assert table.view(300, 150).ids() == [0, 0, 5, 0, 7]
    assert table.view(300, 150).by_tier[:HOT] == [[], [0, 0, 5]]
    for i in (4, 3, 2):
        table.clear(i)
    assert table.view(0).ids() == [] and table.nbytes == 0


def test_no_page_is_lost(storage):
    """Nothing is begun ahead of time: a step that runs would hold the pools."""
    pool = PagePool(storage, pressure=lambda: 0.0)
    cache = PagedCache(pool, SMALL)
    for _ in range(127 + 64 - 20):
        cache.reserve(1)
        cache.advance(1)
    assert storage.in_use == sum(pool.pages)
    fork = cache.fork()
    cache.clear()
    assert storage.in_use == sum(pool.pages) == len(fork.pages)
    del fork
    assert pool.pages == [0, 0, 0] and storage.in_use == 0


@pytest.mark.parametrize("unbounded", [True, False])
def test_pools_stay_within_the_budget_unused_pages_included(storage, unbounded):
    """What would be too much ahead of need is not made, and what is unused elsewhere is given back; the pages
    keep their contents. The same caches without a budget would not fit."""
    budget = 12 * storage.page_bytes(HOT)
    rng, pool = random.Random(3), PagePool(storage, 0 if unbounded else budget, lambda: 0.0)
    most, prepare, written = [0], storage.prepare, dict[int, int]()

    def prepare_and_measure(tier, n):
        prepare(tier, n)
        most[0] = max(most[0], storage.nbytes)

    storage.prepare = prepare_and_measure
    for _ in range(6):
        cache = PagedCache(pool, SMALL)
        for step in range(rng.randrange(3, 9)):
            n = rng.choice([1, 30, 64, 130])
            if cache.offset + n > 500:
                break
            cache.reserve(n)
            for i in range(-(-cache.offset // PAGE), -(-(cache.offset + n) // PAGE)):
                written[i] = 100 * i + step
                for layer in range(3):
                    storage.write(layer, [cache.pages[i].number], 0, rows(written[i]))
            cache.advance(n)
        for i, held in enumerate(cache.pages):
            if held.tier == HOT and i in written:
                want = np.array(rows(written[i])).reshape(2, -1)
                assert np.array_equal(page(storage, 1, held.number, HOT), want)
        cache.clear()
    assert (most[0] > budget) == unbounded


def test_a_hot_page_begins_as_zeros(storage):
    """Without kernels, whatever it held before: NaN would go through a probability of zero."""
    number = storage.make(HOT)
    for layer in range(3):
        storage.write(layer, [number], 0, mx.full((2, 2, PAGE, 160), 255, mx.uint8))
    storage.free(number, HOT)
    other = storage.make(COLD)
    assert storage.make(HOT) == number and other == 0
    assert not any(page(storage, layer, number, HOT).any() for layer in range(3))
