"""Caches on disk: what comes back is what went in, and whatever is wrong with a file, nobody notices."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from ruvmlx.backends.base import under
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.kv import disk
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import F16, TIERED, TierPolicy
from ruvmlx.kv.pool import PagePool
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.models.load import load_model
from ruvmlx.sampling import log_softmax
from ruvmlx.tiers import HOT, PAGE
from tests.models.make_models import make_safetensors_model

SMALL = TierPolicy("tiered", (64, 128))
KEY = {"model": "m", "base": ""}
FOREVER = float("inf")


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windowed")
    sizes = {"head_dim": 64, "n_heads": 4, "n_kv_heads": 2, "sliding_window": 90, "max_context": 1024}
    return load_model(str(make_safetensors_model(folder, **sizes)))


@pytest.fixture
def folder(tmp_path):
    return CacheFolder(tmp_path / "kv", 1 << 30)


def again(folder: CacheFolder, cache, fresh, tokens: list[int]):
    """The cache through a file."""
    assert folder.save("chat", KEY, tokens, cache.dump(), FOREVER)
    assert folder.load("chat", KEY, tokens, fresh) == tokens
    return fresh


def bytes_of(cache) -> list[bytes]:
    return [part.tobytes() for part in cache.dump().parts]


BACKENDS = {
    "native": (lambda m: NativeBackend(m, threads=1, chunk=64), (SMALL, F16)),
    "mlx": (lambda m: MLXBackend(m, threads=1), (SMALL, None)),
    "reference": (ReferenceBackend, (None,)),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("which", ["whole", "windowed"])
@pytest.mark.parametrize("n", [65, 333, 448])
def test_a_cache_comes_back_as_it_was(name, which, n, tiny, windowed, folder):
    """The same bytes in the same tiers, the same logits after, with a page partly filled or none, and pages
    that the window has left."""
    opened, policies = BACKENDS[name]
    model = tiny if which == "whole" else windowed
    backend = opened(model)
    for policy in policies:
        tokens, cache = tokens_of(n), backend.new_cache(policy)
        backend.prefill(tokens[:-3], cache)
        for token in tokens[-3:]:
            backend.decode(token, cache)
        back = again(folder, cache, backend.new_cache(policy), tokens)
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
    back = again(folder, cache, backend.new_cache(policy), tokens)
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
    back = again(folder, cache, backend.new_cache(SMALL), tokens_of(300))
    fork = back.fork()
    assert back.trim(100) and fork.offset == 300
    cache.clear(), back.clear(), fork.clear()
    assert backend.pool.pages == [0, 0, 0] and backend.pool.nbytes == 0


# What is of no use --------------------------------------------------------------------------------


@pytest.fixture
def saved(tiny, folder):
    """A backend, and its cache of 200 tokens in the folder, as "chat"."""
    backend = NativeBackend(tiny, threads=1)
    cache = backend.new_cache(SMALL)
    backend.prefill(tokens_of(200), cache)
    assert folder.save("chat", KEY, tokens_of(200), cache.dump(), FOREVER)
    cache.clear()
    return backend


def file_of(folder: CacheFolder):
    return folder.path / "chat.kv"


def loads(folder: CacheFolder, backend, key=KEY, prompt=None) -> bool:
    prompt = tokens_of(200) if prompt is None else prompt
    found = folder.load("chat", key, prompt, backend.new_cache(SMALL)) is not None
    if not found:
        assert backend.pool.pages == [0, 0, 0], "a page is lost"
    return found


def test_nobody_else_may_read_it(saved, folder):
    assert file_of(folder).stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in folder.path.iterdir()] == ["chat.kv"]


@pytest.mark.parametrize("seed", range(40))
def test_any_damage_is_found_and_removed(saved, folder, seed):
    """One bit anywhere, the end missing, something behind it, another program's file."""
    rng, data = np.random.default_rng(seed), bytearray(file_of(folder).read_bytes())
    match seed % 4:
        case 0 | 1:
            at = int(rng.integers(len(data) if seed % 4 else 40))
            data[at] ^= 1 << int(rng.integers(8))
        case 2:
            del data[int(rng.integers(len(data))) :]
        case 3:
            data = data + b"x" if seed % 8 == 3 else bytearray(rng.bytes(5000))
    file_of(folder).write_bytes(data)
    assert not loads(folder, saved) and not file_of(folder).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"format": disk.FORMAT + 1},
        {"made_by": "0.0.0"},
        {"nbytes": 1},
        {"surprise": 1},
        {"cache": {"offset": 200, "first": 0, "cold": 9, "low": 2}},
        {"cache": {"offset": 10**12, "first": 0, "cold": 0, "low": 0}},
        {"cache": {}},
        {"cache": {"offset": "many", "first": 0, "cold": 0, "low": 0}},
    ],
)
def test_a_sound_file_of_something_else(saved, folder, change):
    """Its checksums are right, what it says is not."""
    data = file_of(folder).read_bytes()
    _, length, _ = disk.PREFIX.unpack_from(data)
    body = data[disk.PREFIX.size + length :]
    text = json.dumps(json.loads(data[disk.PREFIX.size :][:length]) | change).encode()
    file_of(folder).write_bytes(struct.pack("<8sII", disk.MAGIC, len(text), zlib.crc32(text)) + text + body)
    assert not loads(folder, saved) and not file_of(folder).exists()


def test_another_model_base_or_beginning_is_left_alone(saved, folder):
    """The file may be of use again: nothing is loaded, nothing removed."""
    assert not loads(folder, saved, KEY | {"base": "f00"})
    assert not loads(folder, saved, KEY | {"model": "n"})
    assert not loads(folder, saved, prompt=tokens_of(200, seed=9))
    assert loads(folder, saved)


def test_less_than_a_page_is_read_again(tiny, folder):
    backend = NativeBackend(tiny, threads=1)
    cache = backend.new_cache(SMALL)
    backend.prefill(tokens_of(PAGE - 1), cache)
    assert not folder.save("chat", KEY, tokens_of(PAGE - 1), cache.dump(), FOREVER)
    assert not folder.path.exists()


@pytest.mark.parametrize("name", ["../chat", "a/b", "", ".kv", "x" * 65])
def test_a_name_stays_in_the_folder(saved, folder, name):
    cache = saved.new_cache(SMALL)
    saved.prefill(tokens_of(200), cache)
    assert not folder.save(name, KEY, tokens_of(200), cache.dump(), FOREVER)
    assert folder.load(name, KEY, tokens_of(200), saved.new_cache(SMALL)) is None


# The folder ---------------------------------------------------------------------------------------


def kept(folder: CacheFolder) -> set[str]:
    return {file.stem for file in folder.path.iterdir()}


def test_the_oldest_make_room(saved, folder):
    cache = saved.new_cache(SMALL)
    saved.prefill(tokens_of(200), cache)
    size = file_of(folder).stat().st_size
    folder.budget = 3 * size + 10
    for age, name in ((50, "b"), (10, "c"), (0, "d")):
        assert folder.save(name, KEY, tokens_of(200), cache.dump(), FOREVER)
        os.utime(folder.path / f"{name}.kv", (time.time() - age,) * 2)
        os.utime(file_of(folder), (time.time() - 100,) * 2) if file_of(folder).exists() else None
    assert kept(folder) == {"b", "c", "d"} and folder.contents() == (3, 3 * size)
    assert folder.save("b", KEY, tokens_of(200), cache.dump(), FOREVER) and len(kept(folder)) == 3
    folder.budget = size - 1
    assert not folder.save("e", KEY, tokens_of(200), cache.dump(), FOREVER) and len(kept(folder)) == 3
    folder.budget = 0
    folder.tidy({"b", "c", "d"})
    assert kept(folder) == set()


def test_what_belongs_to_no_chat_is_tidied_away(saved, folder):
    for name, age in (("dead.123.new", 2 * disk.STALE), ("writing.124.new", 0)):
        (folder.path / name).write_bytes(b"half")
        os.utime(folder.path / name, (time.time() - age,) * 2)
    folder.tidy({"chat"})
    assert {file.name for file in folder.path.iterdir()} == {"chat.kv", "writing.124.new"}
    folder.tidy(set())
    assert {file.name for file in folder.path.iterdir()} == {"writing.124.new"}


def test_what_takes_too_long_is_given_up(saved, folder):
    before, cache = file_of(folder).read_bytes(), saved.new_cache(SMALL)
    saved.prefill(tokens_of(300), cache)
    assert not folder.save("chat", KEY, tokens_of(300), cache.dump(), time.monotonic() - 1)
    assert file_of(folder).read_bytes() == before and kept(folder) == {"chat"}


def test_a_folder_that_cannot_be_written(saved, folder, tmp_path):
    """No error: the chat is read again."""
    cache = saved.new_cache(SMALL)
    saved.prefill(tokens_of(200), cache)
    (tmp_path / "file").write_text("no folder")
    blocked = CacheFolder(tmp_path / "file", 1 << 30)
    assert not blocked.save("chat", KEY, tokens_of(200), cache.dump(), FOREVER)
    assert blocked.load("chat", KEY, tokens_of(200), saved.new_cache(SMALL)) is None
    blocked.remove("chat"), blocked.tidy(set())
    assert blocked.contents() == (0, 0)


WRITE_FOREVER = """
import sys
from pathlib import Path
import numpy as np
from ruvmlx.kv.cache import Dump
from ruvmlx.kv.disk import CacheFolder
folder = CacheFolder(Path(sys.argv[1]), 1 << 40)
part = np.full(1 << 20, 7, np.uint8)
print("go", flush=True)
for i in range(10**9):
    parts = iter([part] * 16)
    folder.save("chat", {"i": i}, list(range(64)), Dump({"offset": i}, 16 << 20, parts), float("inf"))
"""


class Anything:
    """Takes all that was written."""

    def restore(self, facts, read):
        self.data = read(16 << 20)


def test_kill_9_while_writing_leaves_the_old_or_none(folder):
    rng, folder.path = np.random.default_rng(0), folder.path
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOREVER, str(folder.path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "go\n"
        time.sleep(float(rng.uniform(0.01, 0.15)))
        child.send_signal(signal.SIGKILL)
        child.wait()
        if file_of(folder).exists():
            key = json.loads(file_of(folder).read_bytes()[disk.PREFIX.size :].split(b',"tokens"')[0][7:])
            found = Anything()
            assert folder.load("chat", key, range(64), found) == list(range(64))
            assert found.data == b"\x07" * (16 << 20)


# Sessions -----------------------------------------------------------------------------------------


def ask(engine: LLMInferenceEngine, prompt: list[int], chat: str = "chat"):
    return engine.generate(
        GenerationRequest(
            input_ids=prompt,
            session_id=chat,
            max_new_tokens=8,
            sampling=Sampling(0.0),
            ignore_eos=True,
            logprobs=5,
        )
    )


def test_an_engine_goes_on_where_another_stopped(tiny, folder):
    """Only what is new is read, and the reply is that of the engine that never stopped, to the last bit."""
    opened = lambda: LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)  # noqa: E731
    stays, prompt = opened(), tokens_of(150)
    prompt = [*prompt, *ask(stays, prompt).token_ids, *tokens_of(20, seed=3)]
    stays.sessions.keep_all()
    want = ask(stays, prompt)
    goes_on = opened()
    got = ask(goes_on, prompt)
    assert got.cached_tokens == want.cached_tokens >= 150
    assert [t.top for t in got.logprobs] == [t.top for t in want.logprobs]
    edited = opened()
    assert ask(edited, [*prompt[:100], 5, 6]).cached_tokens in (PAGE, 100)


def test_a_session_that_falls_out_is_found_again(tiny, folder):
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    for i in range(5):
        ask(engine, tokens_of(100, seed=i), f"chat{i}")
    assert kept(folder) == {"chat0"}
    assert ask(engine, tokens_of(100, seed=0), "chat0").cached_tokens == 99
    assert kept(folder) == {"chat0", "chat1"}


def test_what_did_not_change_is_not_written_again(tiny, folder):
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    ask(engine, tokens_of(100))
    engine.sessions.keep_all()
    os.utime(file_of(folder), (1, 1))
    engine.sessions.keep_all()
    assert file_of(folder).stat().st_mtime == 1
    ask(engine, [*tokens_of(100), 7])
    engine.sessions.keep_all()
    assert file_of(folder).stat().st_mtime > 1


def test_what_broke_is_not_taken_up_again(tiny, folder, monkeypatch):
    """A file whose session fails would make it fail at every start."""
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    ask(engine, tokens_of(100))
    engine.sessions.keep_all()
    monkeypatch.setattr(engine.backend, "decode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(engine, [*tokens_of(100), 7])
    assert kept(folder) == set()


def test_keys_and_values_belong_to_their_base(tiny, folder):
    """A base below the head makes others; the head's change makes none."""
    rng, c = np.random.default_rng(4), tiny.config

    def base(module: str, out: int) -> BaseLoRA:
        a = rng.normal(size=(c.hidden_size, 2)).astype(np.float32)
        return BaseLoRA({(module, 0): (a, rng.normal(size=(2, out)).astype(np.float32))}, 0.1)

    head, below = base("lm_head", c.vocab_size), base("v_proj", c.n_kv_heads * c.head_dim)
    equal = BaseLoRA.from_bytes(below.to_bytes())
    assert head.of_keys == "" != below.of_keys == equal.of_keys != below.shrunk(0.5).of_keys

    def cached(lora: BaseLoRA | None) -> int:
        backend = NativeBackend(tiny, threads=1)
        with under(backend, lora):
            engine = LLMInferenceEngine(tiny, backend, SMALL, folder)
            found = ask(engine, tokens_of(100)).cached_tokens
            engine.sessions.keep_all()
            return found

    assert [cached(lora) for lora in (None, head, below, equal, None)] == [0, 99, 0, 99, 0]


def test_another_policy_is_another_cache(tiny, folder):
    def cached(policy) -> int:
        engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), policy, folder)
        found = ask(engine, tokens_of(100)).cached_tokens
        engine.sessions.keep_all()
        return found

    assert [cached(policy) for policy in (F16, SMALL, SMALL, F16)] == [0, 0, 99, 0]


def test_dumped_pages_are_the_memory_itself(tiny):
    """No copy is made of a cache that is written down."""
    backend = NativeBackend(tiny, threads=1)
    cache = backend.new_cache(F16)
    backend.prefill(tokens_of(70), cache)
    (first, _) = cache.dump().parts
    assert first.ctypes.data == cache.pages[0].number and first.nbytes == backend.pool.sizes[HOT]
