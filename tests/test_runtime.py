"""Chats through the Runtime: what the apps call."""

import threading

import pytest

from ruvmlx.engine import Sampling
from ruvmlx.errors import UsageError


def say(runtime, chat, text, cancel_at=None, n=6):
    cancel = threading.Event()
    for chunk in runtime.say(chat, text, sampling=Sampling(0.0), max_new_tokens=n, cancel=cancel):
        if chunk.generated == cancel_at:
            cancel.set()
    return chunk.response


def test_a_chat_survives_a_restart(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.new_chat(system="be kind")
        response = say(runtime, chat, "hello")
    with open_tiny() as runtime:
        assert runtime.last_chat() == chat
        turns = runtime.turns(chat)
    assert [t.role for t in turns] == ["system", "user", "assistant"]
    assert turns[2].content == response.text and turns[2].reply_id == response.request_id


def test_the_second_turn_reuses_the_cache(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.new_chat()
        say(runtime, chat, "hello")
        second = say(runtime, chat, "and again")
    assert second.cached_tokens > 0


def test_a_stopped_reply_is_kept_and_can_be_rated(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.new_chat()
        response = say(runtime, chat, "hello", cancel_at=3, n=50)
        assert response.finish_reason == "cancelled"
        assert runtime.turns(chat)[-1].finish_reason == "cancelled"
        assert runtime.rate("last", "down").applied
        assert runtime.turns(chat)[-1].rating == "down"


def test_a_refused_message_is_not_saved(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.new_chat()
        for bad in (" ", "word " * 700):
            with pytest.raises(UsageError):
                say(runtime, chat, bad)
        assert runtime.turns(chat) == []


def test_a_full_context_drops_the_oldest_turns(open_tiny):
    """A chat goes on past the context; the newest words are always read."""
    with open_tiny() as runtime:
        chat = runtime.new_chat(system="be kind")
        for i in range(12):
            response = say(runtime, chat, f"message number {i} " + "blah " * 20)
            assert response.prompt_tokens < runtime.model.config.max_context
        assert len(runtime.turns(chat)) == 25
        last = runtime.model.tokenizer.decode(runtime.store.reply("last").prompt_ids)
    assert "be kind" in last and "message number 11" in last and "message number 0 " not in last


def test_system_prompt_can_be_changed(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.new_chat()
        say(runtime, chat, "hello")
        runtime.set_system(chat, "be terse")
        assert runtime.turns(chat)[0].content == "be terse"
        say(runtime, chat, "more")
        assert "be terse" in runtime.model.tokenizer.decode(runtime.store.reply("last").prompt_ids)
