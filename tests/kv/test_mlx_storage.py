"""Pages as MLX arrays: numbers, bytes and growth."""

import numpy as np
import pytest

from ruvmlx.backends.mx import mx
from ruvmlx.kernels.metal import demote
from ruvmlx.kv.cache import PagedCache
from ruvmlx.kv.mlx import GROWTH, MLXStorage, MLXTable
from ruvmlx.kv.policy import COLD, HOT, PAGE, WARM, TierPolicy
from ruvmlx.kv.pool import PagePool
from tests.models.make_models import Shape

SHAPE = Shape(n_layers=3, n_heads=6, n_kv_heads=2, head_dim=80)
SMALL = TierPolicy("tiered", 64, 128)


@pytest.fixture
def storage():
    return MLXStorage(SHAPE.config())


def rows(seed: int, tokens: int = PAGE) -> mx.array:
    """uint8 [n_kv_heads, 2, tokens, 2 * head_dim]"""
    values = np.random.default_rng(seed).normal(size=(2, 2, tokens, 80)).astype(np.float16)
    return mx.array(values.view(np.uint8))


def page(storage, layer: int, number: int, tier: int) -> np.ndarray:
    return np.array(storage.pools(layer)[tier][number])


def filled(storage, seed: int) -> int:
    number = storage.make(HOT)
    for layer in range(3):
        storage.write(layer, number, 0, rows(10 * seed + layer))
    return number


def test_bytes(storage):
    assert [storage.page_bytes(tier) for tier in (COLD, WARM, HOT)] == [
        3 * 2 * size for size in (64 * 80 + 512, 128 * 80 + 256, 256 * 80)
    ]
    assert storage.nbytes == 0
    for tier in (COLD, WARM, HOT):
        storage.make(tier)
    assert storage.nbytes == sum(storage.page_bytes(tier) * GROWTH[tier] for tier in (COLD, WARM, HOT))


def test_write_and_copy(storage):
    """A copy has the bytes of its page, in every layer, and its own life."""
    one = filled(storage, 1)
    storage.write(1, one, 7, rows(5, 3))
    two = storage.copy(one)
    storage.write(2, two, 63, rows(6, 1))
    for layer, same in ((0, True), (1, True), (2, False)):
        assert np.array_equal(page(storage, layer, one, HOT), page(storage, layer, two, HOT)) == same
    want = np.array(rows(11))
    want[:, :, 7:10] = np.array(rows(5, 3))
    np.testing.assert_array_equal(page(storage, 1, two, HOT), want.reshape(2, -1))


def test_demotion_is_the_kernels(storage):
    """hot -> warm -> cold in every layer; the sources stay."""
    pages = [filled(storage, seed) for seed in range(1, 7)]
    warm = list(storage.demote(pages, HOT)())
    cold = list(storage.demote([warm[4], warm[1]], WARM)())
    storage.start()
    for layer in range(3):
        for i, number in enumerate(pages):
            hot = rows(10 * (i + 1) + layer).reshape(1, 2, -1)
            np.testing.assert_array_equal(page(storage, layer, number, HOT), hot[0])
            lower = demote.demote_warm_ops(hot, 80)
            np.testing.assert_array_equal(page(storage, layer, warm[i], WARM), lower[0])
            if i in (4, 1):
                at = cold[(4, 1).index(i)]
                np.testing.assert_array_equal(
                    page(storage, layer, at, COLD), demote.demote_cold_ops(lower, 80)[0]
                )


def test_growth_and_return(storage):
    """Pools grow in steps, keep what they hold, use low numbers first, and go when nobody has a page."""
    first = filled(storage, 1)
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
    assert storage.pools(0)[HOT].shape[0] == GROWTH[HOT]


def test_memory_peaks_by_one_layer():
    """Growing, copying and demoting never hold a second copy of all layers."""
    storage = MLXStorage(Shape(n_layers=16, n_kv_heads=4, head_dim=128).config())
    storage.make(WARM)
    mx.eval(*storage.arrays())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(GROWTH[WARM]):
        storage.make(WARM)
    grown = storage.nbytes // 2
    assert mx.get_active_memory() - before <= 1.05 * grown
    assert mx.get_peak_memory() - before <= (1 + 3 / 16) * grown


def test_writes_are_in_place(storage):
    """A token's rows cost their own bytes, not a copy of the pool."""
    number = filled(storage, 1)
    for _ in range(40):
        storage.make(HOT)
    mx.eval(*storage.arrays())
    new = rows(2, 1)
    mx.eval(new)
    for at in range(5):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for layer in range(3):
            storage.write(layer, number, at, new)
        mx.eval(*storage.arrays())
        assert mx.get_peak_memory() - before < storage.pools(0)[HOT].nbytes


def test_table():
    """Pages by tier, whole or as a shorter sequence sees them; gone ones keep the places right."""
    table = MLXTable()
    for i, (number, tier) in enumerate([(9, COLD), (4, WARM), (5, WARM), (0, HOT), (7, HOT)]):
        table.set(i, number, tier)
    view = table.view(300)
    assert (view.cold, view.warm, view.hot) == ([9], [4, 5], [0, 7])
    assert table.view(256).hot == [0]
    assert table.hot_page(255) == 0 and table.hot_page(256) == 7
    with pytest.raises(ValueError, match="position 100"):
        table.hot_page(100)
    table.clear(0), table.clear(1)
    assert table.view(300, 150).ids() == [0, 0, 5, 0, 7]
    assert table.view(300, 150).cold == [] and table.view(300, 150).warm == [0, 0, 5]
    for i in (4, 3, 2):
        table.clear(i)
    assert table.view(0).ids() == [] and table.nbytes == 0


def test_no_page_is_lost(storage):
    """Demotions begun ahead of time and never used come back too."""
    pool = PagePool(storage, pressure=lambda: 0.0)
    cache = PagedCache(pool, SMALL)
    for _ in range(127 + 64 - 20):
        cache.reserve(1)
        cache.advance(1)
    assert storage.in_use > sum(pool.pages)
    fork = cache.fork()
    cache.clear()
    assert storage.in_use == sum(pool.pages) == len(fork.pages)
    del fork
    assert storage.in_use == 0 and pool.pages == [0, 0, 0]
