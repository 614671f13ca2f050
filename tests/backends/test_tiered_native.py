"""The native backend's pages in all tiers, against the oracle's attention over what the pages say."""

import copy
import ctypes
import os
import signal

import numpy as np
import pytest

from ruvmlx.backends.native import storage
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend, ReferenceCache
from ruvmlx.kernels.decoder import Cancelled
from ruvmlx.kernels.matmul import implementations as matmul_implementations
from ruvmlx.kernels.page_table import NativePageTable, PageMemory
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.kv.pool import PagePool
from ruvmlx.models.load import load_model
from ruvmlx.tiers import COLD, EVERYTHING, HOT, PAGE, WARM
from tests.models.make_models import make_safetensors_model
from tests.oracles import pages

SMALL, WARMED = TierPolicy("tiered", (64, 128)), TierPolicy("tiered", (64, EVERYTHING))
TOKENS = [int(t) for t in np.random.default_rng(12).integers(0, 320, 700)]
SIZES = {"hidden_size": 96, "intermediate_size": 160}
SHAPES = {
    "d64-group3": SIZES | {"head_dim": 64, "n_heads": 6, "n_kv_heads": 2},
    "d80-group1-llama3": SIZES | {"head_dim": 80, "n_heads": 3, "n_kv_heads": 3, "llama3": True},
    "d128-group4": SIZES | {"head_dim": 128, "n_heads": 4, "n_kv_heads": 1, "n_layers": 3},
    "d18-biased": SIZES | {"head_dim": 18, "n_heads": 4, "n_kv_heads": 2, "attention_bias": True},
    "d64-window": SIZES | {"head_dim": 64, "n_heads": 4, "n_kv_heads": 2, "sliding_window": 150},
}
# Largest difference of any logit over the largest logit, both sides reading the same codes and scales.
# Queries and weights have 8 bits in front of a cold page (0.6% of their size), 15 in front of a warm one.
TOLERANCE = {SMALL: 6e-3, WARMED: 6e-4}


@pytest.fixture(scope="module", params=SHAPES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return load_model(str(make_safetensors_model(folder, **SHAPES[request.param])))


def opened(model, **options) -> NativeBackend:
    backend = NativeBackend(model, **{"threads": 2, "chunk": 100} | options)
    backend.pool = PagePool(backend.pool.storage, pressure=lambda: 0.0)
    return backend


def worst(ours, theirs) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def head_pages(backend, page) -> np.ndarray:
    """[layer, kv head, bytes] at its address."""
    c, nbytes = backend.config, backend.decoder.page_bytes(page.tier)
    data = (ctypes.c_uint8 * nbytes).from_address(page.number)
    return np.frombuffer(data, np.uint8).reshape(c.n_layers, c.n_kv_heads, -1)


def numbers(tier, head_page, head_dim):
    """K, V: [64, D] as attention means them."""
    data = pages.canonical(tier, head_page, head_dim)
    k, v = pages.numbers_ref(tier, data, head_dim)
    return pages.rotate_ref(k) if tier == COLD else k, v


def as_reference(backend, cache) -> ReferenceCache:
    """The oracle's cache, holding what the pages hold; zeros where the window has left them."""
    c = backend.config
    out, shape = ReferenceCache(c), (c.n_kv_heads, PAGE * len(cache.pages), c.head_dim)
    out.keys, out.values = ([np.zeros(shape, np.float32) for _ in range(c.n_layers)] for _ in range(2))
    for i, page in enumerate(cache.pages):
        for layer, heads in enumerate(head_pages(backend, page)) if page else ():
            for head, data in enumerate(heads):
                k, v = numbers(page.tier, data, c.head_dim)
                out.keys[layer][head, PAGE * i : PAGE * (i + 1)] = k
                out.values[layer][head, PAGE * i : PAGE * (i + 1)] = v
    out.offset = cache.offset
    return out


def run(backend, tokens, cache) -> np.ndarray:
    """[T, V]: one token is decoded, more are verified."""
    return (
        backend.decode(tokens[0], cache).logits[None] if len(tokens) == 1 else backend.verify(tokens, cache)
    )


def calls(total):
    """Sizes of calls: chunks, single tokens, a few at once."""
    done = 0
    for size in (70, 1, 1, 100, 3, *[1] * 70, 90, 64, *[1] * 30, 5, 37, *[1] * 1000):
        if done < total:
            yield min(size, total - done)
            done += size


@pytest.mark.parametrize("policy", [SMALL, WARMED], ids=["small", "warmed"])
def test_attention_over_the_pages(model, policy):
    """Every call gives what the oracle makes of the same pages, in all tiers and at all lengths of calls."""
    backend, oracle = opened(model), ReferenceBackend(model)
    cache, at, seen, off = backend.new_cache(policy), 0, set(), 0.0
    for n in calls(520):
        part = TOKENS[at : at + n]
        cache.reserve(n)
        want = oracle.verify(part, as_reference(backend, cache)) if n > 1 or at % 7 == 0 else None
        ours = run(backend, part, cache)
        off = max(off, worst(ours, want)) if want is not None else off
        seen |= {page.tier for page in cache.pages if page}
        at += n
    assert seen == ({COLD, WARM, HOT} if policy == SMALL else {WARM, HOT}) and cache.offset == 520
    assert off < TOLERANCE[policy]


def test_other_pages_would_be_noticed(model):
    """The tolerance is less than what the cold tier itself costs."""
    backend, oracle = opened(model), ReferenceBackend(model)
    full, cache = backend.new_cache(), backend.new_cache(TierPolicy("tiered", (64, 64)))
    backend.prefill(TOKENS[:500], full), backend.prefill(TOKENS[:500], cache)
    cache.reserve(10)
    one, other = (oracle.verify(TOKENS[500:510], as_reference(backend, c)) for c in (full, cache))
    assert worst(one, other) > 1.5 * TOLERANCE[SMALL]


def test_the_same_bits(model):
    """Whatever the threads, whether demotion ran ahead or not, and after trims."""
    kept = []
    for threads, ahead in ((1, True), (3, True), (2, False)):
        backend, at = opened(model, threads=threads), 0
        cache, rows = backend.new_cache(SMALL), []
        for n in calls(420):
            cache._look = 0 if ahead else 1 << 40
            rows.append(run(backend, TOKENS[at : at + n], cache))
            at += n
        kept.append(np.concatenate(rows))
    np.testing.assert_array_equal(kept[0], kept[1])
    np.testing.assert_array_equal(kept[0], kept[2])


@pytest.mark.parametrize("impl", matmul_implementations())
def test_every_implementation_agrees_in_the_cold_tier(model, impl):
    """Each against the oracle, deep in the cold tier."""
    backend, oracle = opened(model, impl=impl), ReferenceBackend(model)
    cache = backend.new_cache(SMALL)
    backend.prefill(TOKENS[:400], cache)
    for part in (TOKENS[400:401], TOKENS[401:404], TOKENS[404:444]):
        cache.reserve(len(part))
        want = oracle.verify(part, as_reference(backend, cache))
        assert worst(run(backend, part, cache), want) < TOLERANCE[SMALL]


def test_forks_and_failures(model):
    """A fork shares pages and goes its own way; one call that is stopped leaves all pages as they were."""
    backend = opened(model)
    one = backend.new_cache(SMALL)
    backend.prefill(TOKENS[:300], one)
    two, three = one.fork(), one.fork()
    two.reserve(40)
    with pytest.raises(Cancelled):
        backend.decoder.forward(TOKENS[:40], two.table, two.offset, cancel=ctypes.c_int(1))
    two.abandon()
    first = backend.verify(TOKENS[300:340], two)
    backend.prefill(TOKENS[:50], one)
    np.testing.assert_array_equal(first, backend.verify(TOKENS[300:340], three))
    for cache in (one, two, three):
        cache.clear()
    assert backend.pool.pages == [0, 0, 0]


def test_a_child_forked_while_pages_are_demoted(model):
    """Its demotion has lost its thread: it does the work itself."""
    backend = opened(model)
    cache, other = backend.new_cache(SMALL), backend.new_cache(SMALL)
    for c in (cache, other):
        backend.prefill(TOKENS[:96], c)
    want = [backend.decode(t, other).logits for t in TOKENS[96:140]]
    lower = copy.copy(cache.pool.storage.demote)
    started = lower([cache.pages[0].number] * 3, HOT)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)
            made = started()
            got = [backend.decode(t, cache).logits for t in TOKENS[96:140]]
            status = int(len(made) != 3 or not np.array_equal(got, want))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    for page in started():
        backend.pool.storage.free(page, WARM)


def test_pages_are_demoted_without_a_thread(model, monkeypatch):
    """If the system starts no thread, the pages get the same bits, and the reply goes on."""
    backend = opened(model)
    cache, other = backend.new_cache(SMALL), backend.new_cache(SMALL)
    for c in (cache, other):
        backend.prefill(TOKENS[:96], c)
    want = [backend.decode(t, other).logits for t in TOKENS[96:240]]

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(storage.threading.Thread, "start", refuse)
    np.testing.assert_array_equal([backend.decode(t, cache).logits for t in TOKENS[96:240]], want)
    assert backend.pool.pages[WARM] > 0


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_goes_back_to_the_system():
    size = 96 << 20
    before, page = resident(), PageMemory.make(size)
    ctypes.memset(page, 1, size)
    assert page % 64 == 0 and resident() > before + 0.9 * size
    page.free()
    assert resident() < before + 0.1 * size


def test_a_page_table_grows_forgets_and_refuses():
    """It grows, forgets, and says when it is too short."""
    table = NativePageTable()
    table.set(0, 4096, HOT), table.set(70, 8192, COLD), table.clear(0)
    assert [tuple(map(int, table.rows[i])) for i in (0, 70)] == [(0, 0, 0), (8192, COLD, 0)]
    assert table.pointer(71 * PAGE) == table.rows.ctypes.data and table.nbytes == 16
    with pytest.raises(ValueError, match="too short"):
        table.pointer(PAGE * len(table.rows) + 1)


def test_a_missing_page_is_refused(model):
    """No page, or one that is not hot where tokens are to be written: ValueError, nothing is read."""
    backend = opened(model)
    cache = backend.new_cache(SMALL)
    with pytest.raises(ValueError, match="no hot page"):
        backend.decoder.forward([1], cache.table, 0)
    backend.prefill(TOKENS[:200], cache)
    cache.reserve(1)
    with pytest.raises(ValueError, match="no hot page"):
        backend.decoder.forward([1], cache.table, 10)
    with pytest.raises(ValueError, match="cannot demote"):
        backend.decoder.demote(cache.pages[0].number, WARM, cache.pages[-1].number, HOT)
