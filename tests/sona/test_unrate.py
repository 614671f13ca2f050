"""The rating of one older reply is taken back while the words of other rated replies are gone."""

import pytest

from ruvmlx.errors import UsageError
from ruvmlx.ratings import FACTS
from ruvmlx.store import traces

from ..store.test_privacy import say
from .test_bases import promote


def test_words_that_are_gone_are_named_and_nothing_changes(open_tiny):
    with open_tiny() as runtime:
        chats = [runtime.chats.new_chat() for _ in range(2)]
        replies = [say(runtime, chat, "hello") for chat in chats]
        for reply in replies:
            runtime.rate(reply, "up")
        runtime.erase_chat(chats[1])
    with open_tiny() as runtime:
        before = runtime.status()
        with pytest.raises(UsageError, match=r"stays: a reply that was rated later.*learn rollback 0"):
            runtime.unrate(replies[0])
        assert runtime.status() == before and before.ratings == 2


def test_memory_forgets_what_the_store_did_not_keep(open_tiny):
    """The next version has the number of the one that was rolled back. The memory of rated questions and the
    taste stayed those of the failed attempt, until the program ended."""
    with open_tiny() as runtime:
        chats = [runtime.chats.new_chat() for _ in range(4)]
        replies = [say(runtime, chat, f"question {i}") for i, chat in enumerate(chats)]
        for reply in replies[:3]:
            runtime.rate(reply, "up")
        runtime.erase_chat(chats[2])
        runtime.learner.traces.held.clear()  # as later: the newest traces alone are in memory
        with pytest.raises(UsageError, match="stays"):
            runtime.unrate(replies[0])
        runtime.rate(replies[3], "down", FACTS)
        learner = runtime.learner
        learner.rating_index.sync()
        assert learner.rating_index.bank.labels() == dict.fromkeys(replies[:3], "up")
        assert learner.taste.model.ratings == 2


def test_wrong_facts_stay_wrong_facts_when_the_words_go(open_tiny):
    """They teach nothing before and after."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        reply = say(runtime, chat, "hello")
        runtime.rate(reply, "down", f"{FACTS}: the word is another one")
        assert runtime.learner.history.labels() == []
        runtime.erase_chat(chat)
        assert runtime.learner.history.labels() == []
        assert [row.note for row in runtime.learner.history.ratings()] == [FACTS]


def test_the_model_reads_no_reply_while_the_store_is_locked(open_tiny, monkeypatch):
    """Other programs wait for the lock. The store keeps few traces; the model reads the other replies
    before."""
    monkeypatch.setattr(traces, "KEEP_TRACES", 2)
    with open_tiny() as runtime:
        replies = [say(runtime, runtime.chats.new_chat(), f"hello {i}") for i in range(9)]
        for i, reply in enumerate(replies):
            runtime.rate(reply, "up" if i % 3 else "down")
        calls = []
        for name in ("hidden_states", "head"):
            real = getattr(runtime.backend, name)

            def call(*args, name=name, real=real):
                calls.append((name, runtime.store.db.in_transaction))
                return real(*args)

            monkeypatch.setattr(runtime.backend, name, call)
        runtime.unrate(replies[0])
        assert ("hidden_states", False) in calls and ("hidden_states", True) not in calls
        # at most one for each rating: the trace under the new weights
        assert calls.count(("head", True)) < len(replies) and runtime.status().ratings == 8


@pytest.mark.parametrize(
    "change",
    [
        lambda runtime, replies: runtime.unrate(replies[0]),
        lambda runtime, replies: runtime.choices.give_reason(replies[1], "long"),
    ],
)
def test_the_model_is_not_measured_while_the_store_is_locked(open_tiny, monkeypatch, change):
    """The KL probe under a base LoRA is in memory only, so a new process measures it."""
    with open_tiny() as runtime:
        promote(runtime)
        replies = [say(runtime, runtime.chats.new_chat(), f"hello {i}") for i in range(2)]
        for reply in replies:
            runtime.rate(reply, "down")
    with open_tiny() as runtime:
        calls, real = [], runtime.backend.hidden_states

        def call(*args):
            calls.append(runtime.store.db.in_transaction)
            return real(*args)

        monkeypatch.setattr(runtime.backend, "hidden_states", call)
        change(runtime, replies)
        assert calls and not any(calls)
