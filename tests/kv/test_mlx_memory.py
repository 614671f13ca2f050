"""What a long prompt leaves in memory on MLX: the pools of an 8B cache grow and shrink meanwhile."""

import numpy as np

from ruvmlx.backends.mlx.storage import MLXStorage
from ruvmlx.kv.cache import PagedCache
from ruvmlx.kv.policy import TIERED
from ruvmlx.kv.pool import PagePool
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import COLD, PAGE
from tests.models.shapes import Shape

TOKENS, CHUNK = 16_384, 2_048


def read(cache: PagedCache, layers: int, rows: mx.array) -> None:
    """A prompt in steps, as the backend reads one: pages, rows, demotion."""
    storage = cache.pool.storage
    for _ in range(0, TOKENS, CHUNK):
        cache.reserve(CHUNK)
        pages = [cache.table.hot_page(cache.offset + at) for at in range(0, CHUNK, PAGE)]
        for layer in range(layers):
            storage.write(layer, pages, 0, rows)
        mx.eval(*storage.arrays())
        cache.advance(CHUNK)
        mx.eval(*storage.arrays())
        mx.clear_cache()  # what the step itself left, as the backend does


def test_reading_16384_tokens(pytestconfig, record_property):
    """Live and cached buffers: at most 1.3 times the pages; the peak stays below an f16 cache's bytes."""
    layers = 32 if pytestconfig.getoption("--full") else 4
    storage = MLXStorage(Shape(n_layers=layers, n_kv_heads=8, head_dim=128).config())
    cache = PagedCache(PagePool(storage, pressure=lambda: 0.0), TIERED)
    values = np.random.default_rng(0).normal(size=(8, 2, CHUNK, 128)).astype(np.float16)
    rows = mx.array(values.view(np.uint8))
    mx.eval(rows)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read(cache, layers, rows)
    live, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    stats = cache.stats()
    assert cache.offset == TOKENS and all(stats.tokens)
    kept = (live + mx.get_cache_memory()) / stats.bytes
    print(
        f"\n{TOKENS:,} tokens, {layers} layers: pages {stats.bytes / 1e6:.0f} MB,"
        f" live + cached {kept:.2f} times that, peak {peak / 1e6:.0f} MB, f16 {stats.f16_bytes / 1e6:.0f} MB"
    )
    record_property("live_and_cached", kept)
    assert kept <= 1.3
    assert peak < stats.f16_bytes


def test_growth_alone_leaves_nothing_behind():
    """Page by page, between the steps that empty MLX's buffer cache."""
    storage = MLXStorage(Shape(n_layers=4, n_kv_heads=8, head_dim=128).config())
    mx.clear_cache()
    for _ in range(300):
        storage.make(COLD)
    assert mx.get_cache_memory() < 0.05 * storage.nbytes
