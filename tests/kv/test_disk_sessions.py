"""Engines whose sessions go to disk and come back: what is kept, when, and for whom."""

import threading
import time

import numpy as np
import pytest

from ruvmlx.backends.base import with_lora
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.session_disk import EarlyPart, SessionsOnDisk
from ruvmlx.kv import owners, page_file
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import F16
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.tiers import PAGE

from .disk import SMALL, chats_with_pages, files, tokens_of


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


@pytest.fixture
def nothing_early(monkeypatch):
    """Only what leaves memory is written: the other thread writes at its own time."""
    monkeypatch.setattr(SessionsOnDisk, "keep_early", lambda *_: None)


def test_a_session_that_falls_out_is_found_again(tiny, folder, nothing_early):
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    engine.sessions.capacity = 4
    for i in range(5):
        ask(engine, tokens_of(100, seed=i), f"chat{i}")
    assert chats_with_pages(folder) == {"chat0"}
    assert ask(engine, tokens_of(100, seed=0), "chat0").cached_tokens == 99
    assert chats_with_pages(folder) == {"chat0", "chat1"}


def test_what_did_not_change_is_not_written_again(tiny, folder):
    """Only the page that is not full yet."""
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    ask(engine, tokens_of(100))
    engine.sessions.keep_all()
    before = {file: file.stat().st_ino for file in files(folder)}
    engine.sessions.keep_all()
    assert {file: file.stat().st_ino for file in files(folder)} == before
    ask(engine, [*tokens_of(100), 7])
    engine.sessions.keep_all()
    assert len(files(folder)) == len(before) + 1


def test_what_broke_is_not_taken_up_again(tiny, folder, monkeypatch):
    """Pages whose session fails would make it fail at every start."""
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    ask(engine, tokens_of(100))
    engine.sessions.keep_all()
    monkeypatch.setattr(engine.backend, "decode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(engine, [*tokens_of(100), 7])
    assert chats_with_pages(folder) == set() and files(folder) == []


def test_requests_without_a_chat_are_kept_if_they_say_so(tiny, folder):
    """Only then their words go to disk."""
    opened = lambda: LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)  # noqa: E731
    one = opened()
    for seed, resumable in ((0, True), (1, False)):
        one.generate(GenerationRequest(input_ids=tokens_of(150, seed), resumable=resumable, max_new_tokens=2))
    one.sessions.keep_all()
    two = opened()
    found = [two.generate(GenerationRequest(input_ids=tokens_of(150, seed))).cached_tokens for seed in (0, 1)]
    assert found == [149, 0] and chats_with_pages(folder) == {owners.REQUESTS}


def until(condition) -> None:
    """Wait for another thread."""
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for 20 s")


def test_pages_that_will_not_change_are_written_early(tiny, folder):
    """In another thread, after each reply; so a process that is killed leaves them, and one that ends writes
    the newest pages alone. The pool loses no page."""
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    prompt = tokens_of(300)
    for turn in range(3):
        prompt += [*ask(engine, prompt).token_ids, *tokens_of(10, seed=turn)]
    until(lambda: len(files(folder)) >= 3)
    assert {file.suffix for file in files(folder)} <= {".cold", ".warm"}
    killed = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    assert ask(killed, prompt, "other").cached_tokens >= 192
    engine.sessions.keep_all()
    assert {file.suffix for file in files(folder)} == {".cold", ".warm", ".hot", ".tail"}
    engine.sessions.clear()
    assert engine.backend.pool.pages == [0, 0, 0]


def test_an_early_write_goes_on_after_an_error(tiny, folder, monkeypatch):
    """The error of one write is told once, and the sequences after it are written."""
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    with monkeypatch.context() as patch:
        patch.setattr(EarlyPart, "write", lambda *_: {}["a fault"])
        prompt = [*tokens_of(300), *ask(engine, tokens_of(300)).token_ids]
        until(lambda: engine.sessions.disk.take_failures() == ["KeyError"])
    assert not files(folder) and engine.sessions.disk.take_failures() == []
    ask(engine, [*prompt, *tokens_of(10)])
    until(lambda: files(folder))


def test_nothing_is_written_for_a_chat_that_was_deleted(tiny, folder, monkeypatch):
    """The other thread stops in between."""
    begun, go_on, write = threading.Event(), threading.Event(), page_file.write

    def slowly(*args):
        begun.set()
        write(*args)
        go_on.wait(0.2)

    monkeypatch.setattr(page_file, "write", slowly)
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    ask(engine, tokens_of(400))
    assert begun.wait(20)
    engine.sessions.drop("chat")
    assert files(folder) == []
    go_on.set()
    engine.sessions.keep_all()
    assert files(folder) == [] and chats_with_pages(folder) == set()


def test_keys_and_values_belong_to_their_base(tiny, folder):
    """A base below the head makes others; the head's change makes none."""
    rng, c = np.random.default_rng(4), tiny.config

    def base(module: str, out: int) -> BaseLoRA:
        a = rng.normal(size=(c.hidden_size, 2)).astype(np.float32)
        return BaseLoRA({(module, 0): (a, rng.normal(size=(2, out)).astype(np.float32))}, 0.1)

    head, below = base("lm_head", c.vocab_size), base("v_proj", c.n_kv_heads * c.head_dim)
    equal = BaseLoRA.from_bytes(below.to_bytes())
    assert head.of_keys == "" != below.of_keys == equal.of_keys != below.shrunk(0.5).of_keys

    def count_cached(lora: BaseLoRA | None) -> int:
        backend = NativeBackend(tiny, threads=1)
        with with_lora(backend, lora):
            engine = LLMInferenceEngine(tiny, backend, SMALL, folder)
            found = ask(engine, tokens_of(100)).cached_tokens
            engine.sessions.keep_all()
            return found

    assert [count_cached(lora) for lora in (None, head, below, equal, None)] == [0, 99, 0, 99, 99]


def test_another_policy_is_another_cache(tiny, folder):
    def count_cached(policy) -> int:
        engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), policy, folder)
        found = ask(engine, tokens_of(100)).cached_tokens
        engine.sessions.keep_all()
        return found

    assert [count_cached(policy) for policy in (F16, SMALL, SMALL, F16)] == [0, 0, 99, 99]


def test_nothing_is_written_for_requests_whose_words_were_deleted(tiny, folder, monkeypatch):
    """The deletion uses another object for the folder, so the other thread must have ended before."""
    begun, go_on, write = threading.Event(), threading.Event(), page_file.write

    def slowly(*args):
        begun.set()
        go_on.wait(0.2)
        write(*args)

    monkeypatch.setattr(page_file, "write", slowly)
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    engine.generate(GenerationRequest(input_ids=tokens_of(300), resumable=True, max_new_tokens=2))
    assert begun.wait(20)
    engine.sessions.drop(owners.REQUESTS)
    CacheFolder(folder.path, 0).remove(owners.REQUESTS)
    go_on.set()
    engine.sessions.clear()
    assert files(folder) == []


def test_files_of_the_old_format_are_deleted(tiny, folder, nothing_early):
    """Those of a chat that still exists, too: nothing reads them. Pages stay."""
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), SMALL, folder)
    ask(engine, tokens_of(200))
    engine.sessions.keep_all()
    pages = files(folder)
    for chat in ("chat", "another"):
        (folder.path / f"{chat}.kv").write_bytes(b"RUVMLXKV")
    folder.remove("another")
    assert [path.name for path in folder.path.glob("*.kv")] == ["chat.kv"]
    folder.tidy({"chat"})
    assert pages and files(folder) == pages and not list(folder.path.glob("*.kv"))
