"""Caches on disk: what comes back is what went in, and what nobody needs goes."""

import os
import shutil
import subprocess
import time
from functools import partial

import numpy as np
import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.kv import owners
from ruvmlx.kv.disk import DAY, STALE, CacheFolder
from ruvmlx.kv.policy import F16, TIERED
from ruvmlx.kv.pool import PagePool
from ruvmlx.models.load import load_model
from ruvmlx.sampling import log_softmax
from ruvmlx.tiers import HOT, PAGE
from tests.models.make_models import make_safetensors_model

from .disk import SMALL, bytes_of, chats_with_pages, files, names_of, read_back, save, tokens_of


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windowed")
    sizes = {"head_dim": 64, "n_heads": 4, "n_kv_heads": 2, "sliding_window": 90, "max_context": 1024}
    return load_model(str(make_safetensors_model(folder, **sizes)))


def again(folder: CacheFolder, cache, make, tokens: list[int]):
    """The cache through files."""
    assert save(folder, tokens, cache)
    back, held = folder.load(names_of(tokens), tokens, make)
    assert held == tokens
    return back


BACKENDS = {
    "native": (lambda m: NativeBackend(m, threads=1, chunk=64), (SMALL, F16)),
    "mlx": (lambda m: MLXBackend(m, device="cpu", threads=1), (SMALL, None)),
    "reference": (ReferenceBackend, (None,)),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("which", ["whole", "windowed"])
@pytest.mark.parametrize("n", [65, 333, 448])
def test_a_cache_comes_back_as_it_was(name, which, n, tiny, windowed_model, folder):
    """The same bytes in the same tiers, the same logits after, with a page partly filled or none, and pages
    that the window has left."""
    opened, policies = BACKENDS[name]
    model = tiny if which == "whole" else windowed_model
    backend = opened(model)
    for policy in policies:
        shutil.rmtree(folder.path, ignore_errors=True)
        tokens, cache = tokens_of(n), backend.new_cache(policy)
        backend.prefill(tokens[:-3], cache)
        for token in tokens[-3:]:
            backend.decode(token, cache)
        back = again(folder, cache, partial(backend.new_cache, policy), tokens)
        assert bytes_of(back) == bytes_of(cache) and back.offset == n
        want, got = cache.stats(), back.stats()
        assert (want.tokens, want.tier_bytes[-1] > 0) == (got.tokens, got.tier_bytes[-1] > 0)
        for token in tokens_of(70, seed=1):
            here, there = backend.decode(token, cache), backend.decode(token, back)
            if name != "mlx":
                assert np.array_equal(here.logits, there.logits)
        np.testing.assert_allclose(here.logits, there.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", [TIERED, F16], ids=["tiered", "f16"])
def test_the_starter_goes_on_bit_for_bit(starter, policy, folder):
    """All three tiers of the real model: next-token log-probabilities of the resumed and the never-stopped
    session are the same numbers, across the next demotions."""
    backend = NativeBackend(starter)
    backend.pool = PagePool(backend.pool.storage, pressure=lambda: 0.0)
    tokens, cache = tokens_of(2300), backend.new_cache(policy)
    backend.prefill(tokens, cache)
    back = again(folder, cache, partial(backend.new_cache, policy), tokens)
    if policy == TIERED:
        stats = back.stats()
        assert min(stats.tokens) > 0
        assert sum(stats.tier_bytes) == stats.bytes - back.table.nbytes
    for token in tokens_of(70, seed=2):
        here, there = backend.decode(token, cache), backend.decode(token, back)
        assert np.array_equal(log_softmax(here.logits), log_softmax(there.logits))


def test_pages_of_a_resumed_cache_go_back(tiny, folder):
    backend = NativeBackend(tiny, threads=1)
    cache = backend.new_cache(SMALL)
    backend.prefill(tokens_of(300), cache)
    back = again(folder, cache, partial(backend.new_cache, SMALL), tokens_of(300))
    fork = back.fork()
    assert back.trim(100) and fork.offset == 300
    cache.clear(), back.clear(), fork.clear()
    assert backend.pool.pages == [0, 0, 0] and backend.pool.nbytes == 0


def test_another_end_is_cut_off(saved_backend, folder):
    """Whole pages count, then tokens within the last one. A page of 4 bits is not used as the newest."""
    for n in (64, 70, 128, 191):
        prompt = [*tokens_of(200)[:n], *tokens_of(90, seed=8)]
        assert read_back(folder, saved_backend, prompt=prompt) == (n // PAGE * PAGE if n >= 128 else 0)
    assert read_back(folder, saved_backend, prompt=[*tokens_of(200)[:197], *tokens_of(90, seed=8)]) == 197


def test_less_than_a_page_is_read_again(tiny, folder):
    backend = NativeBackend(tiny, threads=1)
    cache = backend.new_cache(SMALL)
    backend.prefill(tokens_of(PAGE - 1), cache)
    assert not save(folder, tokens_of(PAGE - 1), cache)
    assert not folder.path.exists()


def test_chats_of_other_lengths_share_pages_in_the_tiers_that_fit(tiny, folder):
    """A long chat leaves pages in lower tiers than a short one: each takes those that its policy asks for,
    and a page without such a file goes as far down as the ones after it."""
    backend = NativeBackend(tiny, threads=1)
    caches = {}
    for n in (450, 150):
        caches[n] = backend.new_cache(SMALL)
        backend.prefill(tokens_of(n), caches[n])
        assert save(folder, tokens_of(n), caches[n], f"chat{n}")
    for n, cache in caches.items():
        found, held = folder.load(names_of(tokens_of(n)), tokens_of(n), partial(backend.new_cache, SMALL))
        assert held == tokens_of(n) and bytes_of(found) == bytes_of(cache)
    folder.remove("chat150")
    found, held = folder.load(names_of(tokens_of(150)), tokens_of(150), partial(backend.new_cache, SMALL))
    assert len(held) in (64, 128) and held == tokens_of(150)[: len(held)]
    tiers = [page.tier for page in found.pages]
    assert tiers == sorted(tiers)


# The folder ---------------------------------------------------------------------------------------


def test_the_least_recently_used_make_room(saved_backend, folder):
    """The newest pages of a sequence first: they are useless without the older ones."""
    size, one = sum(file.stat().st_size for file in files(folder)), files(folder)
    assert folder.contents() == (1, size)
    other = tokens_of(200, seed=1)
    cache = saved_backend.new_cache(SMALL)
    saved_backend.prefill(other, cache)
    folder.budget = 2 * size + 10
    assert save(folder, other, cache, "other") and read_back(folder, saved_backend) == 200
    folder.budget = 2 * size - 100
    folder.tidy({"chat", "other"})
    assert set(one) < set(files(folder)) and read_back(folder, saved_backend, of=1) == 192
    folder.budget = size // 2
    assert not save(folder, other, cache, "large") and len(files(folder)) == 7
    folder.budget = 0
    folder.tidy({"chat", "other"})
    assert files(folder) == []


def test_pages_belong_to_all_who_use_them(saved_backend, folder):
    """What two chats have in common stays until both are deleted."""
    cache, longer = saved_backend.new_cache(SMALL), [*tokens_of(128), *tokens_of(90, seed=3)]
    saved_backend.prefill(longer, cache)
    assert save(folder, longer, cache, "other")
    before = files(folder)
    folder.remove("chat")
    assert chats_with_pages(folder) == {"other"} and set(files(folder)) < set(before)
    assert read_back(folder, saved_backend, prompt=longer[:128] + [5] * 70) == 128
    folder.remove("other")
    assert list(folder.path.iterdir()) == []


def test_nothing_is_saved_early_for_a_chat_that_was_removed(saved_backend, folder):
    """Another thread than the engine's saves pages early."""
    tokens = tokens_of(448, seed=5)
    cache = saved_backend.new_cache(SMALL)
    saved_backend.prefill(tokens, cache)
    folder.remove("chat")
    names, until = names_of(tokens), time.monotonic() + 60
    assert not folder.save("chat", names, tokens, cache, until, stop=lambda: False)
    assert chats_with_pages(folder) == set()
    assert folder.save("chat", names, tokens, cache, until)
    assert chats_with_pages(folder) == {"chat"}


def test_what_belongs_to_no_chat_is_tidied_away(saved_backend, folder):
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = f"writing.{os.getpid()}.new"
    for name, age in ((f"dead.{ended.pid}.new", 0), (f"old.{os.getpid()}.new", 2 * STALE), (own, 0)):
        (folder.path / name).write_bytes(b"half")
        os.utime(folder.path / name, (time.time() - age,) * 2)
    nobodys = folder.path / ("ab" * 20 + ".hot")
    nobodys.write_bytes(b"words")
    there = files(folder)
    folder.tidy({"chat"})
    assert files(folder) == [file for file in there if file != nobodys]
    assert [file.name for file in folder.path.glob("*.new")] == [own]
    folder.tidy(set())
    assert {file.name for file in folder.path.iterdir()} == {own}


def test_what_was_read_outside_of_chats_goes_after_a_day(saved_backend, folder):
    cache, tokens = saved_backend.new_cache(SMALL), tokens_of(150, seed=4)
    saved_backend.prefill(tokens, cache)
    assert save(folder, tokens, cache, owners.REQUESTS) and folder.contents()[0] == 1
    folder.tidy({"chat"})
    assert len(files(folder)) == 7
    for file in files(folder):
        os.utime(file, (time.time() - DAY - 1,) * 2)
    folder.tidy({"chat"})
    assert len(files(folder)) == 4 and read_back(folder, saved_backend) == 200


def test_dumped_pages_are_the_memory_itself(tiny):
    """No copy is made of a cache that is written down."""
    backend = NativeBackend(tiny, threads=1)
    cache = backend.new_cache(F16)
    backend.prefill(tokens_of(70), cache)
    (first, _) = cache.dump().parts
    assert first.ctypes.data == cache.pages[0].number and first.nbytes == backend.pool.sizes[HOT]
