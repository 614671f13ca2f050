"""Chats like a text: by stored vectors where there are any, and bounded where there are none."""

import threading

import pytest

from ruvmlx.backends.select import open_backend
from ruvmlx.errors import UsageError
from ruvmlx.sona import similar_chats
from ruvmlx.sona.similar_chats import chats_like
from ruvmlx.store import Store

EGG, TRAIN, CODE = "how do I boil an egg", "a train from Paris to Lyon", "my loop never ends"


@pytest.fixture
def runtime(open_tiny, tiny_backend):
    with open_tiny() as opened:
        yield opened
    tiny_backend.set_lora(None)


def ask(runtime, *questions: str) -> str:
    """A chat of these questions."""
    chat = runtime.chats.new_chat()
    for question in questions:
        list(runtime.chats.say(chat, question, max_new_tokens=2, cancel=threading.Event()))
    return chat


def find_like(runtime, text, **more):
    return chats_like(runtime.store, runtime.model, runtime.backend, text, **more)


@pytest.fixture
def readings(monkeypatch):
    """The texts that the model reads."""
    read, real = [], similar_chats.read_question

    def read_and_count(backend, tokenizer, text):
        assert backend.lora is None
        read.append(text)
        return real(backend, tokenizer, text)

    monkeypatch.setattr(similar_chats, "read_question", read_and_count)
    return read


def test_a_chat_counts_by_its_most_similar_question(runtime):
    """On any branch; most like first; a deleted chat is not found."""
    egg, both, code = ask(runtime, EGG), ask(runtime, CODE, TRAIN), ask(runtime, CODE)
    found = find_like(runtime, TRAIN).found
    assert found[0].session.id == both and found[0].content == TRAIN
    assert found[0].similarity == pytest.approx(1, abs=1e-4)
    assert [row.similarity for row in found] == sorted((row.similarity for row in found), reverse=True)
    same = {row.session.id for row in find_like(runtime, CODE).found[:2]}
    assert same == {both, code} and len(find_like(runtime, CODE, limit=1).found) == 1
    runtime.store.chats.soft_delete(egg)
    assert egg not in {row.session.id for row in find_like(runtime, EGG).found}
    with pytest.raises(UsageError, match="empty"):
        find_like(runtime, "")


def test_a_stored_vector_is_not_computed_again(runtime, readings):
    """Questions that the rating index has read; another model's vectors are not compared."""
    ask(runtime, EGG)
    ask(runtime, TRAIN, EGG)
    runtime.learning.settle()
    readings.clear()
    assert find_like(runtime, EGG).found[0].similarity > 0.99
    assert readings == [EGG]  # the text to compare with
    with runtime.store.transaction():
        runtime.store.db.execute("UPDATE replies SET fingerprint = 'another'")
    readings.clear()
    assert find_like(runtime, EGG).found[0].similarity > 0.99
    assert readings == [EGG, TRAIN]  # each text once


def test_what_one_search_reads_is_bounded(runtime, readings, monkeypatch):
    """The chats used last are compared; the number of the other messages is told."""
    monkeypatch.setattr(similar_chats, "MOST_READ", 2)
    first = ask(runtime, EGG)
    for question in (TRAIN, CODE):
        ask(runtime, question)
    with runtime.store.transaction():
        runtime.store.db.execute("UPDATE replies SET query = NULL")
    readings.clear()
    counts = []
    answer = find_like(runtime, "something else", progress=counts.append)
    assert readings == ["something else", CODE, TRAIN] and counts == [1, 2]
    assert answer.unread == 1 and first not in {row.session.id for row in answer.found}


def test_on_the_starter_model(starter, home):
    """A question is found by another one of its meaning, in other words."""
    store, backend = Store(home / "ruvmlx.db"), open_backend("native", starter, threads=1)
    for question in ("How do I get from Paris to Lyon by train?", "How long do I boil an egg?"):
        store.messages.add_user(store.chats.new("m"), question)
    found = chats_like(store, starter, backend, "travelling by rail in France").found
    assert found[0].content == "How do I get from Paris to Lyon by train?"
    assert not chats_like(store, starter, backend, "xyzzy plugh").found
