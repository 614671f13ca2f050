"""The tiered cache on MLX, against the full cache and against `tiers.Judge`, on small models."""

import functools
import random
import threading

import numpy as np
import pytest

from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.mlx import tiered_cpu
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.errors import UsageError
from ruvmlx.kernels.library import LibraryError
from ruvmlx.kv.policy import F16, TierPolicy
from ruvmlx.kv.pool import PagePool
from ruvmlx.models.load import load_model
from tests.metal.conftest import GPU
from tests.models.make_models import make_safetensors_model

from .tiers import Judge

SMALL = TierPolicy("tiered", (64, 128))
TOKENS = [int(t) for t in np.random.default_rng(11).integers(0, 320, 700)]
SIZES = {"hidden_size": 96, "intermediate_size": 160}
SHAPES = {
    "d64-group3": SIZES | {"head_dim": 64, "n_heads": 6, "n_kv_heads": 2},
    "d80-group1-llama3": SIZES | {"head_dim": 80, "n_heads": 3, "n_kv_heads": 3, "llama3": True},
    "d128-group4": SIZES | {"head_dim": 128, "n_heads": 4, "n_kv_heads": 1, "n_layers": 3},
    "d32-biased": SIZES | {"head_dim": 32, "n_heads": 4, "n_kv_heads": 2, "attention_bias": True},
    "d64-alibi": {"family": "mpt", "hidden_size": 128, "intermediate_size": 160, "head_dim": 64}
    | {"n_heads": 2, "n_kv_heads": 1},
    "d64-window": SIZES | {"head_dim": 64, "n_heads": 4, "n_kv_heads": 2, "sliding_window": 150},
}
# Largest difference of any logit over the largest logit. A key that rounding moves across a quantiser's step
# is the most of it; on the CPU, the 8 bits of queries in front of cold pages; in 16-bit graphs, rounding.
TO_THE_JUDGE = {"cpu": 6e-3, "graph": 2e-2, "gpu": 2e-2}
TO_THE_FULL = 0.06


@pytest.fixture(scope="module", params=SHAPES)
def shape(request, tmp_path_factory):
    return load_model(
        str(make_safetensors_model(tmp_path_factory.mktemp(request.param), **SHAPES[request.param]))
    )


def opened(model, way: str = "cpu", chunk: int = 100) -> MLXBackend:
    """cpu: our float32 layers; graph: what a GPU runs, mlx-lm's modules in f16, on the CPU's stream."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "graph":
            as_on_metal = functools.partial(mlx.plan, device="metal")
            patch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
        backend = MLXBackend(model, device=None if way == "gpu" else "cpu", chunk=chunk)
    backend.pool = PagePool(backend.pool.storage, pressure=lambda: 0.0)
    return backend


WAYS = ["cpu", "graph", pytest.param("gpu", marks=pytest.mark.skipif(not GPU, reason="no Metal or CUDA"))]


def worst(ours, theirs) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def calls(total: int):
    """Sizes of calls: chunks, single tokens, a few at once; `total` tokens."""
    done = 0
    for size in (70, 1, 1, 100, 3, *[1] * 70, 90, 64, *[1] * 30, 5, 37, *[1] * 1000):
        if done < total:
            yield min(size, total - done)
            done += size


@pytest.mark.parametrize("way", WAYS)
def test_judge_and_full_cache(shape, way):
    """Prompts in chunks, decoding and verifying, through all tiers."""
    backend = opened(shape, way)
    cache, full, judge = backend.new_cache(SMALL), backend.new_cache(), Judge(backend, SMALL)
    at, seen = 0, set()
    for n in calls(520):
        part = TOKENS[at : at + n]
        ours = backend.decode(part[0], cache).logits[None] if n == 1 else backend.verify(part, cache)
        assert worst(ours, judge.logits(part)) < TO_THE_JUDGE[way]
        assert worst(ours, backend.verify(part, full)) < TO_THE_FULL
        at += n
        seen |= {page.tier for page in cache.pages if page is not None}
    assert seen == {0, 1, 2} and cache.offset == at == 520
    stats = cache.stats()
    assert stats.bytes < 0.6 * stats.f16_bytes
    assert stats.bytes == backend.pool.nbytes + cache.table.nbytes


def test_the_judge_is_strict(shape):
    """Were the tiers not met, or met at another time, the judge would say so."""
    backend = opened(shape)
    cache, other = backend.new_cache(SMALL), Judge(backend, TierPolicy("tiered", (64, 64)))
    parts = [TOKENS[i : i + 100] for i in range(0, 400, 100)]
    found = [worst(backend.verify(part, cache), other.logits(part)) for part in parts]
    assert max(found) > 1.5 * TO_THE_JUDGE["cpu"]


@pytest.mark.parametrize("way", ["cpu", "graph"])
def test_chunks_and_single_tokens(shape, way):
    """A chunk within which no page is due gives what its tokens give one by one."""
    backend = opened(shape, way)
    one, other = backend.new_cache(SMALL), backend.new_cache(SMALL)
    for cache in (one, other):
        backend.prefill(TOKENS[:330], cache)
        backend.decode(5, cache)
    together = backend.verify(TOKENS[331:380], one)
    single = np.stack([backend.decode(token, other).logits for token in TOKENS[331:380]])
    assert one.stats() == other.stats()
    assert worst(together, single) < TO_THE_JUDGE[way]


class Broken(Exception):
    pass


def failing(backend, cache, tokens, rng) -> None:
    """A call that breaks in some layer, or after all of them."""
    layers = backend._graph.model.layers
    where = rng.randrange(len(layers) + 1)

    def broken(*_):
        raise Broken

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Broken):
        if where < len(layers):
            patch.setitem(layers[where], "mlp", broken)
        else:
            patch.setattr(backend, "_last", broken)
        backend.prefill(tokens, cache)


def counted(walks) -> list[int]:
    """Pages of all sequences by tier, each once."""
    pages = {id(p): p for cache, _ in walks for p in cache.pages if p is not None}.values()
    return [sum(page.tier == tier for page in pages) for tier in range(3)]


@pytest.mark.parametrize(("way", "seed"), [("cpu", 0), ("cpu", 1), ("graph", 2)])
def test_logits_survive_failures_trims_forks_and_closings(shape, seed, way):
    """Failures, trims, forks and closings at random points: the logits stay the judge's, who sees only the
    calls that ended well; no page is lost."""
    backend, rng = opened(shape, way), random.Random(seed)
    walks = [(backend.new_cache(SMALL), Judge(backend, SMALL))]
    for _ in range(50):
        cache, judge = rng.choice(walks)
        tokens = [rng.randrange(320) for _ in range(rng.choice((1, 1, 2, 30, 100)))]
        match rng.choice(("run", "run", "run", "fail", "trim", "fork", "close")):
            case "run":
                ours = backend.prefill(tokens, cache).logits
                assert worst(ours, judge.logits(tokens)[-1]) < TO_THE_JUDGE[way]
            case "fail":
                before = cache.offset
                failing(backend, cache, tokens, rng)
                judge.begin()
                assert cache.offset == before
            case "trim":
                cache.trim(rng.randrange(min(cache.offset, 150) + 1))
                judge.trim(cache.offset)
            case "fork" if len(walks) < 4:
                walks.append((cache.fork(), judge.fork()))
            case "close" if len(walks) > 1:
                walks.remove((cache, judge))
                cache.clear()
        # A demotion that one sequence began ahead of time ends when another one needs one of its pages.
        assert all(a >= b for a, b in zip(backend.pool.pages, counted(walks), strict=True))
        if way == "graph":
            assert backend.pool.storage.in_use >= sum(backend.pool.pages)  # more: begun ahead of time
    for cache, _ in walks:
        cache.clear()
    assert backend.pool.pages == [0, 0, 0]
    assert way != "graph" or backend.pool.storage.in_use == 0


def test_no_policy_and_f16_are_the_plain_cache(shape):
    """No policy and f16 are the plain cache; the NumPy backend has nothing else."""
    backend = opened(shape)
    assert backend.new_cache().stats().policy == backend.new_cache(F16).stats().policy == "f16"
    assert backend.new_cache(SMALL).stats().policy == "tiered"
    with pytest.raises(UsageError, match="f16"):
        ReferenceBackend(shape).new_cache(SMALL)


def test_without_the_c_library_the_cache_is_plain_and_the_user_is_told(shape, monkeypatch):
    def missing(*_):
        raise LibraryError("librvm.so is not installed")

    monkeypatch.setattr(tiered_cpu, "PagedAttention", missing)
    backend = MLXBackend(shape, device="cpu")
    assert backend.new_cache(SMALL).stats().policy == "f16" and "no tiers" in backend.caveat
    assert opened(shape, "graph").caveat == ""


def test_pages_change_threads(shape):
    """A cache goes on in another thread, also after a call that failed, and with demotions begun."""
    backend = opened(shape)
    cache, rng = backend.new_cache(SMALL), random.Random(1)
    judge, out = Judge(backend, SMALL), []

    def turn():
        failing(backend, cache, TOKENS[:50], rng)
        for _ in range(45):
            out[:] = [backend.decode(7, cache).logits]

    for _ in range(5):
        thread = threading.Thread(target=turn)
        thread.start()
        thread.join()
    for _ in range(5 * 45):
        want = judge.logits([7])[-1]
    assert cache.offset == 225
    assert worst(out[0], want) < TO_THE_JUDGE["cpu"]


def test_real_text_in_a_small_policy_is_near_the_full_cache(starter, record_property):
    """Real text in a small policy: near the full cache, and mostly the same words."""
    from tests.oracles.divergence import mean_kl

    from .test_starter import TEXT

    backend = opened(starter, chunk=128)
    ids = starter.tokenizer.encode(TEXT.read_text())[:600]
    cache, full = backend.new_cache(TierPolicy("tiered", (64, 256))), backend.new_cache()
    kl = mean_kl(backend.verify(ids, full), backend.verify(ids, cache))
    record_property("kl_nats", kl)
    stats = cache.stats()
    print(f"\nmean KL(full || tiered) over 600 tokens: {kl:.5f} nats; {stats}")
    assert 0 < kl < 0.02 and stats.tokens[0] >= 192 and stats.tokens[1] >= 128
    ours, theirs = greedy(backend, cache, ids[-1], 40), greedy(backend, full, ids[-1], 40)
    same = next((i for i in range(40) if ours[i] != theirs[i]), 40)
    record_property("same_tokens", same)
    assert same >= 8


def greedy(backend, cache, token: int, n: int) -> list[int]:
    out = [token]
    for _ in range(n):
        out.append(int(backend.decode(out[-1], cache).logits.argmax()))
    return out[1:]
