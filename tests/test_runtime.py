"""Chats through the Runtime: what the apps call."""

import sqlite3
import threading

import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.engine.context_window import cut
from ruvmlx.errors import CacheTooLarge, StoreError, UsageError
from ruvmlx.models.config.model import Message
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona.calibration import Measurement
from ruvmlx.store import Store


def say(runtime, chat, text, cancel_at=None, n=6):
    cancel = threading.Event()
    for chunk in runtime.chats.say(chat, text, sampling=Sampling(0.0), max_new_tokens=n, cancel=cancel):
        if chunk.generated == cancel_at:
            cancel.set()
    return chunk.response


def test_a_chat_survives_a_restart(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat(system="be kind")
        response = say(runtime, chat, "hello")
    with open_tiny() as runtime:
        assert runtime.chats.last_chat() == chat
        turns = runtime.chats.turns(chat)
    assert [t.role for t in turns] == ["system", "user", "assistant"]
    assert turns[2].content == response.text and turns[2].reply_id == response.request_id


def test_the_second_turn_reuses_the_cache(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello")
        second = say(runtime, chat, "and again")
    assert second.cached_tokens > 0


def test_a_stopped_reply_is_kept_and_can_be_rated(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        response = say(runtime, chat, "hello", cancel_at=3, n=50)
        assert response.finish_reason == "cancelled"
        assert runtime.chats.turns(chat)[-1].finish_reason == "cancelled"
        assert runtime.rate("last", "down").applied
        assert runtime.chats.turns(chat)[-1].rating == "down"


def test_a_refused_message_is_not_saved(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        for bad in (" ", "word " * 700):
            with pytest.raises(UsageError):
                say(runtime, chat, bad)
        assert runtime.chats.turns(chat) == []


def test_a_full_context_drops_the_oldest_turns(open_tiny):
    """A chat goes on past the context; the newest words are always read."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat(system="be kind")
        for i in range(12):
            response = say(runtime, chat, f"message number {i} " + "blah " * 20)
            assert response.prompt_tokens < runtime.model.config.max_context
        assert len(runtime.chats.turns(chat)) == 25
        last = runtime.model.tokenizer.decode(runtime.store.replies.get("last").prompt_ids)
    assert "be kind" in last and "message number 11" in last and "message number 0 " not in last


@pytest.mark.parametrize("limit", [6, 120, 10_000])
def test_a_chat_goes_on_where_memory_holds_less_than_the_context(tiny, home, limit):
    """The oldest turns go, as in a full context: a chat whose every message is refused is lost."""
    backend, settings = NativeBackend(tiny, threads=1), Settings(adapter="none", kv_disk=None)
    backend.pool.budget = int(4.2 * backend.pool.sizes[-1])
    with Runtime(Store(home / "ruvmlx.db"), tiny, backend, settings, learn=False) as runtime:
        chat = runtime.chats.new_chat(system="be kind")
        for i in range(12):
            response = say(runtime, chat, f"message number {i} " + "blah " * 9, n=limit, cancel_at=3)
            assert response.generation_tokens == 3
        with pytest.raises(CacheTooLarge):  # a message that can have no answer is not saved
            say(runtime, chat, "word " * 80, n=limit)
        assert len(runtime.chats.turns(chat)) == 25 and runtime.chats.left_out(chat, limit)


def test_a_full_context_still_finds_its_cache(open_tiny):
    """The oldest turns go half a context at a time, here three: the others prefill only what is new."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        cached = [say(runtime, chat, f"message number {i} " + "blah " * 8).cached_tokens for i in range(30)]
    assert sum(c < 100 for c in cached[5:]) <= 25 // 3


def test_the_models_own_sampling_holds_in_chats_too(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        monkeypatch.setattr(runtime.model, "default_sampling", {"temperature": 0.0, "top_k": 1})
        said = set()
        for _ in range(3):
            chat = runtime.chats.new_chat()
            chunks = list(runtime.chats.say(chat, "hello", max_new_tokens=5, cancel=threading.Event()))
            said.add(chunks[-1].response.text)
        assert len(said) == 1


def test_bad_sampling_is_refused_before_anything_is_saved(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        with pytest.raises(UsageError, match="temperature"):
            next(
                runtime.chats.say(
                    chat, "hi", sampling=Sampling(-1.0), max_new_tokens=5, cancel=threading.Event()
                )
            )
        assert runtime.chats.turns(chat) == []
        with pytest.raises(UsageError, match="temperature"):
            settings = Settings(adapter="none", temperature=-1)
            type(runtime)(runtime.store, runtime.model, runtime.backend, settings)


def test_system_prompt_can_be_changed(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello")
        runtime.chats.set_system(chat, "be terse")
        assert runtime.chats.turns(chat)[0].content == "be terse"
        say(runtime, chat, "more")
        assert "be terse" in runtime.model.tokenizer.decode(runtime.store.replies.get("last").prompt_ids)


def question(text, seed=0, n=8):
    return GenerationRequest(
        messages=[Message("user", text)], max_new_tokens=n, sampling=Sampling(0.8, seed=seed), ignore_eos=True
    )


def test_many_answers_are_those_of_each_alone(open_tiny):
    """After a rating, too: the adapter is the one that was learned; nothing of the answers is kept."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        before = runtime.writer.answer(question("one")).token_ids
        for _ in range(3):
            runtime.rate(say(runtime, chat, "hello", n=20).request_id, "down")
        asked = [question(t, seed, 3 + seed % 4) for seed, t in enumerate(["one", "two", "and three"] * 7)]
        want = {r.request_id: runtime.writer.answer(r).token_ids for r in asked}
        replies, last = len(runtime.chats.turns(chat)), runtime.writer.last_reply_id
        assert {r.request_id: r.token_ids for r in runtime.writer.answers(iter(asked))} == want
        assert (len(runtime.chats.turns(chat)), runtime.writer.last_reply_id) == (replies, last)
        assert runtime.writer.answer(question("one")).token_ids != before


def test_many_answers_refuse_before_the_first(open_tiny):
    with open_tiny() as runtime, pytest.raises(UsageError, match="empty"):
        runtime.writer.answers([question("one"), question(" ")])


def test_what_was_measured_of_a_model_is_not_measured_again(open_tiny, monkeypatch):
    """Nor is it in a test that opens the tiny model: that took longer than all else in most of them."""
    monkeypatch.setattr(Measurement, "run", lambda *_: pytest.fail("it was measured again"))
    with open_tiny() as runtime:
        runtime.learning.learner.active.measure()


def test_an_error_in_the_write_of_a_cache_is_a_row_of_the_log(open_tiny, monkeypatch):
    """The reply is not lost, and the row has the class of the error and no words."""
    with open_tiny() as runtime:
        monkeypatch.setattr(runtime.engine.sessions.disk, "take_failures", lambda: ["KeyError"])
        say(runtime, runtime.chats.new_chat(), "Hello")
        [row] = runtime.store.witness.rows("cache_failure")
        assert row.body == {"model": runtime.model.fingerprint, "error": "KeyError"}


def test_the_oldest_messages_are_cut_as_soon_as_they_do_not_fit():
    assert [cut([10, 10, last], limit=30, half=15) for last in (10, 11)] == [0, 2]


def test_a_runtime_that_cannot_save_its_learning_still_keeps_its_caches(open_tiny, monkeypatch):
    runtime, kept = open_tiny(), []

    def no_space():
        raise StoreError("the disk is full")

    monkeypatch.setattr(runtime.learning, "close", no_space)
    monkeypatch.setattr(runtime.engine.sessions, "keep_all", lambda: kept.append(True))
    with pytest.raises(StoreError, match="disk is full"):
        runtime.close()
    assert kept
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        runtime.store.db.value("SELECT 1")
