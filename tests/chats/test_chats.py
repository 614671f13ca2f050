"""Branches of a chat through the Runtime: again, in other words, on with it; and what a kill leaves."""

import contextlib
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ruvmlx.chats.conversations import TAIL
from ruvmlx.engine import Sampling
from ruvmlx.engine.detokenize import StreamDecoder
from ruvmlx.engine.types import Begun
from ruvmlx.errors import NotFound, StoreBusy, UsageError

from ..test_runtime import say


def run(chunks):
    """The response of a whole reply, and the text as it streamed."""
    shown = []
    for chunk in chunks:
        shown.append(chunk.text)
    return chunk.response, "".join(shown)


def options(n=6, temperature=0.0, seed=None):
    return dict(sampling=Sampling(temperature, seed=seed), max_new_tokens=n, cancel=threading.Event())


def chat_texts(runtime, chat):
    return [t.content for t in runtime.chats.turns(chat)]


def test_again_writes_beside_and_reads_nothing_twice(open_tiny):
    """Greedy, the second reply is the first; of its prompt all but one token was in the cache."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        first = say(runtime, chat, "hello")
        second, _ = run(runtime.chats.again(chat, **options()))
        assert second.token_ids == first.token_ids and second.request_id != first.request_id
        assert second.cached_tokens == second.prompt_tokens - 1
        turns = runtime.chats.turns(chat)
        assert [t.reply_id for t in turns] == [None, second.request_id]
        assert (turns[-1].branch, turns[-1].branches) == (2, 2)
        assert runtime.store.replies.get(first.request_id).text == first.text


def test_two_terminals_in_one_chat(open_tiny):
    """Each reply stands under its own question, and each continues what its user saw."""
    with open_tiny() as one, open_tiny() as other:
        chat = one.chats.new_chat()
        say(one, chat, "begin")
        mine, theirs = (r.chats.say(chat, q, **options()) for r, q in ((one, "mine"), (other, "theirs")))
        next(mine)  # its question is stored, its reply is being written
        second, _ = run(theirs)
        first, _ = run(mine)
        again, _ = run(other.chats.again(chat, **options()))
        rows = {row.id: row for row in one.store.messages.all(chat)}
        asked = {row.reply_id: rows[row.parent].content for row in rows.values() if row.reply_id}
        assert asked[first.request_id] == "mine" and asked[second.request_id] == "theirs"
        assert asked[again.request_id] == "mine"  # the reply that came last
        question = next(row for row in rows.values() if row.content == "theirs")
        assert rows[question.parent].content == "mine"  # which was the last message when it was asked


def test_an_earlier_reply_again(open_tiny):
    """What followed it stays, on its own branch."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat(system="be kind")
        say(runtime, chat, "one")
        say(runtime, chat, "two")
        before = runtime.chats.turns(chat)
        run(runtime.chats.again(chat, message=before[2].id, **options(temperature=2.0, seed=1)))
        assert len(runtime.chats.turns(chat)) == 3
        runtime.chats.next_sibling(chat, -1)
        assert chat_texts(runtime, chat) == [t.content for t in before]


def test_a_question_in_other_words(open_tiny):
    """The reply is that of a chat in which the first wording never was; the shared beginning is cached."""
    with open_tiny() as runtime:
        chat, fresh = runtime.chats.new_chat(), runtime.chats.new_chat()
        say(runtime, chat, "one")
        say(runtime, chat, "what a wrong question")
        wrong = runtime.chats.turns(chat)[2]
        new, _ = run(runtime.chats.say(chat, "two", instead_of=wrong.id, **options()))
        say(runtime, fresh, "one")
        expected = say(runtime, fresh, "two")
        assert new.token_ids == expected.token_ids and new.cached_tokens > 20
        assert chat_texts(runtime, chat) == chat_texts(runtime, fresh)
        runtime.chats.next_sibling(chat, 1)
        assert runtime.chats.turns(chat)[2].content == "what a wrong question"


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_going_on_is_as_if_it_had_not_been_cut(open_tiny, cut):
    """Token for token and letter for letter, at any place, also when it is cut twice."""
    with open_tiny() as runtime:
        whole_chat, chat = runtime.chats.new_chat(), runtime.chats.new_chat()
        whole = say(runtime, whole_chat, "hello", n=12)
        first = say(runtime, chat, "hello", n=cut)
        second, shown = run(runtime.chats.continue_reply(chat, **options(4)))
        third, _ = run(runtime.chats.continue_reply(chat, **options(12 - 4 - cut)))
        assert first.token_ids + second.token_ids + third.token_ids == whole.token_ids
        assert third.text == whole.text == chat_texts(runtime, chat)[-1]
        assert second.cached_tokens >= second.prompt_tokens - 2
        assert first.text + shown == second.text
        assert runtime.chats.turns(chat)[-1].branches == 3
        assert runtime.store.replies.get("last").prompt == "hello"
        assert runtime.rate("last", "up").applied


def test_going_on_with_half_a_character(tiny):
    """The bytes before the cut and the bytes after the cut make one character."""
    tokenizer = tiny.tokenizer
    ids = tokenizer.encode("a中é", add_bos=False)
    for cut in range(1, len(ids)):
        first = StreamDecoder(tokenizer)
        begun = "".join(map(first.add, ids[:cut]))
        rest = StreamDecoder(tokenizer)
        text = rest.go_on(Begun(begun, tuple(ids[:cut])))
        assert text + "".join(map(rest.add, ids[cut:])) == "a中é"


@pytest.mark.parametrize("seed", range(20))
def test_going_on_keeps_the_signs_of_invalid_bytes(tiny, seed):
    """The model writes bytes that are no characters. The text of each cut reply is the start of the whole."""
    rng = np.random.default_rng(seed)
    ids = [id for id in range(tiny.tokenizer.vocab_size) if len(tiny.tokenizer.token_bytes(id)) == 1]
    drawn = [int(id) for id in rng.choice(ids, 40)]
    whole = "".join(map(StreamDecoder(tiny.tokenizer).add, drawn))
    for cut in range(1, len(drawn)):
        begun = "".join(map(StreamDecoder(tiny.tokenizer).add, drawn[:cut]))
        rest = StreamDecoder(tiny.tokenizer)
        text = rest.go_on(Begun(begun, tuple(drawn[max(0, cut - TAIL) : cut])))
        assert text == begun and text + "".join(map(rest.add, drawn[cut:])) == whole


def test_what_cannot_be_gone_on_with(open_tiny):
    """A reply that ended by itself, a question, an empty chat: one line each, and nothing is moved."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        for call in (runtime.chats.continue_reply, runtime.chats.again):
            with pytest.raises(NotFound):
                run(call(chat, **options()))
        with pytest.raises(NotFound):
            runtime.chats.next_sibling(chat, 1)
        say(runtime, chat, "hello")
        runtime.store.db.execute("UPDATE replies SET finish_reason = 'stop'")
        with pytest.raises(UsageError, match="is complete"):
            run(runtime.chats.continue_reply(chat, **options()))
        runtime.store.db.execute("UPDATE replies SET finish_reason = 'length', fingerprint = 'x'")
        with pytest.raises(UsageError, match="began that reply"):
            run(runtime.chats.continue_reply(chat, **options()))
        with pytest.raises(NotFound, match="not in the conversation"):
            run(runtime.chats.again(chat, message=99, **options()))
        with pytest.raises(UsageError):
            run(
                runtime.chats.say(
                    chat, "word " * 700, instead_of=runtime.chats.turns(chat)[0].id, **options()
                )
            )
        assert len(runtime.chats.turns(chat)) == 2


def deleted_hours_ago(store, chat, hours):
    with contextlib.closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE sessions SET deleted = ? WHERE id = ?", (time.time() - 3600 * hours, chat))


def test_a_deleted_chat_can_come_back_for_a_day(open_tiny):
    """Whoever deleted it may end meanwhile: the command line, the app and the server keep the same day."""
    with open_tiny() as runtime:
        kept, gone = runtime.chats.new_chat(), runtime.chats.new_chat()
        for chat in (kept, gone):
            say(runtime, chat, "hello")
            runtime.store.chats.soft_delete(chat)
        assert runtime.chats.last_chat() is None
    with open_tiny() as runtime:
        runtime.store.chats.restore(kept)
        assert runtime.chats.last_chat() == kept and len(runtime.chats.turns(gone)) == 2
        deleted_hours_ago(runtime.store, gone, 23)
    with open_tiny() as runtime:
        assert len(runtime.chats.turns(gone)) == 2
        deleted_hours_ago(runtime.store, gone, 25)
    with open_tiny() as runtime:
        assert runtime.chats.last_chat() == kept
        with pytest.raises(NotFound):
            runtime.chats.turns(gone)


KILLED = """
import os, sys, threading
from pathlib import Path
from ruvmlx.chats import stored_replies
from ruvmlx.backends.select import open_backend
from ruvmlx.chats import soft_delete
from ruvmlx.engine import Sampling
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

stored_replies.SAVE_EVERY = 0.0
model = load_model(sys.argv[1])
settings = Settings(adapter="none", kv_disk=None)
runtime = Runtime(Store(Path(sys.argv[2])), model, open_backend("reference", model), settings)
chat = runtime.chats.new_chat()
options = {"sampling": Sampling(0.0), "max_new_tokens": 50, "cancel": threading.Event()}
for chunk in runtime.chats.say(chat, "hello", **options):
    if chunk.generated == 9:
        os.kill(os.getpid(), 9)
"""


def test_killed_in_the_middle_of_a_reply(open_tiny, tiny_folder, home):
    """The words so far are there at the next start, can be rated, and gone on with."""
    with open_tiny() as runtime:
        whole = say(runtime, runtime.chats.new_chat(), "hello", n=12)
        path = runtime.store.path
    done = subprocess.run([sys.executable, "-c", KILLED, str(tiny_folder), str(path)], timeout=300)
    assert done.returncode == -9
    with open_tiny() as runtime:
        chat = runtime.chats.last_chat()
        assert chat is not None
        reply = runtime.chats.turns(chat)[-1]
        assert reply.finish_reason == "cancelled" and whole.text.startswith(reply.content)
        ids = runtime.store.replies.get(reply.reply_id).sampled_ids
        assert 7 <= len(ids) <= 9 and ids == whole.token_ids[: len(ids)]
        rest, _ = run(runtime.chats.continue_reply(chat, **options(12 - len(ids))))
        assert rest.text == whole.text
        assert runtime.rate(reply.reply_id, "up").applied


def test_a_reply_whose_prompt_was_deleted_is_not_continued_without_one(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        reply = say(runtime, chat, "hello", n=4)
        runtime.store.db.execute("UPDATE replies SET prompt_ids = x'' WHERE id = ?", reply.request_id)
        with pytest.raises(UsageError, match="its stored prompt was deleted"):
            run(runtime.chats.continue_reply(chat, **options()))


def test_a_busy_store_costs_no_reply(open_tiny, monkeypatch):
    """Another process holds the lock for longer than one attempt waits."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        add, busy = runtime.store.replies.add, []

        def add_later(*args, **kwargs):
            if len(busy) < 3:
                busy.append(1)
                raise StoreBusy("locked")
            return add(*args, **kwargs)

        monkeypatch.setattr(runtime.store.replies, "add", add_later)
        reply = say(runtime, chat, "hello", n=4)
        assert len(busy) == 3 and chat_texts(runtime, chat) == ["hello", reply.text]


def test_another_system_prompt_is_another_room(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat("short")
        for n in range(4):
            say(runtime, chat, f"question {n} " * 4, n=4)
        few = runtime.chats.left_out(chat, 64)
        runtime.store.chats.set_system(chat, "a long system prompt " * 14)
        many = runtime.chats.left_out(chat, 64)
        assert len(many) > len(few)


def test_a_choice_that_is_not_learned_leaves_the_chat_as_it_is(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello", n=4)
        first = runtime.chats.turns(chat)[-1].id
        run(runtime.chats.again(chat, **options(temperature=1.0, seed=3)))
        second = runtime.chats.turns(chat)[-1].id

        def fail(*_):
            raise StoreBusy("locked")

        monkeypatch.setattr(runtime.choices, "prefer", fail)
        with pytest.raises(StoreBusy):
            runtime.chats.prefer(chat, first, second)
        assert runtime.chats.turns(chat)[-1].id == second
