"""Liked replies as examples in the prompt: which, where, how many, and only if switched on."""

import threading

import pytest

from ruvmlx.engine import GenerationRequest
from ruvmlx.errors import UsageError
from ruvmlx.models.config.model import Message
from ruvmlx.sona.rating_index import whole_sentences
from ruvmlx.store import Store

from .test_bank import reply


def store_rated_reply(runtime, question, answer, rating="up") -> str:
    """Store a rated reply with this text."""
    reply_id = reply(runtime, question)
    runtime.rate(reply_id, rating)
    runtime.store.db.execute(
        "UPDATE replies SET text = ?, finish_reason = 'stop' WHERE id = ?", answer, reply_id
    )
    return reply_id


def prompt_and_row(runtime, *texts, **fields):
    """The prompt for a question, and the examples in it."""
    messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    request = GenerationRequest(messages=messages, max_new_tokens=3, ignore_eos=True, **fields)
    *_, last = runtime.writer.generate(request)
    row = runtime.store.replies.get(request.request_id)
    assert last.response.examples == row.examples
    return runtime.model.tokenizer.decode(row.prompt_ids), row


def test_examples_are_off_unless_asked_for(open_tiny):
    with open_tiny() as runtime:
        store_rated_reply(runtime, "how is tea made?", "with water")
        text, row = prompt_and_row(runtime, "how is tea made, then?")
        assert row.examples == () and "with water" not in text
        assert runtime.learner.rating_index.status().hits == 0


def test_liked_replies_to_similar_questions_are_shown_before_the_question(open_tiny):
    with open_tiny(examples=2) as runtime:
        assert prompt_and_row(runtime, "how is tea made?")[1].examples == ()  # nothing to show
        tea = store_rated_reply(runtime, "how is tea made?", "with water")
        store_rated_reply(runtime, "how is tea brewed?", "no idea", "down")
        text, row = prompt_and_row(runtime, "how is tea made by you?")
        assert row.examples == (tea,) and row.prompt == "how is tea made by you?"
        assert text.index("how is tea made?") < text.index("with water") < text.index("made by you")
        assert runtime.store.replies.examples_used(runtime.model.fingerprint) == [tea, tea]
        assert runtime.learner.rating_index.status().hits == 2
    with open_tiny() as runtime:
        assert runtime.learner.rating_index.status().hits == 2  # as the store remembers


def test_no_question_is_shown_twice_nor_the_one_that_is_asked(open_tiny):
    with open_tiny(examples=8) as runtime:
        old = store_rated_reply(runtime, "how is tea made?", "with water")
        new = store_rated_reply(runtime, "How is  tea made", "with milk")
        _, row = prompt_and_row(runtime, "how is tea made by you?")
        assert len(row.examples) == 1 and row.examples[0] in (old, new)
        assert prompt_and_row(runtime, "how is TEA made?")[1].examples == ()
        assert (
            prompt_and_row(runtime, "how is tea made?", "with water", "how is tea made by you?")[1].examples
            == ()
        )


def test_examples_go_right_before_the_last_message(open_tiny):
    with open_tiny(examples=1) as runtime:
        store_rated_reply(runtime, "how is tea made?", "with water")
        text, row = prompt_and_row(runtime, "good day", "hello", "how is tea made by you?")
        assert len(row.examples) == 1
        order = [text.index(t) for t in ("good day", "hello", "with water", "made by you")]
        assert order == sorted(order)


@pytest.mark.parametrize("length,fits", [(20, True), (100, False), (400, False)])
def test_examples_never_take_more_than_a_quarter_of_the_context(open_tiny, length, fits):
    with open_tiny(examples=8) as runtime:
        store_rated_reply(runtime, "how is tea made?", "w" * length)
        _, row = prompt_and_row(runtime, "how is tea made by you?")
        assert bool(row.examples) == fits
        assert len(row.prompt_ids) < runtime.model.config.max_context


def test_examples_leave_room_for_the_reply(open_tiny):
    """A long conversation gets none, rather than no reply."""
    with open_tiny(examples=8) as runtime:
        store_rated_reply(runtime, "how is tea made?", "with water")
        long = "x" * 420
        _, row = prompt_and_row(runtime, long, "yes", "how is tea made by you?")
        assert row.examples == () and len(row.sampled_ids) == 3


@pytest.mark.parametrize(
    "text,whole",
    [
        ("With water. And mi", "With water."),
        ("1. Tea\n2. Milk\n3. sug", "1. Tea\n2. Milk"),
        ('He said "no." Then h', 'He said "no."'),
        ("用水。再", "用水。"),
        ("no end", ""),
        ("UncappedUpdate.", "UncappedUpdate."),
        ("", ""),
    ],
)
def test_what_was_cut_off_ends_with_a_whole_sentence(text, whole):
    assert whole_sentences(text) == whole


def test_replies_of_which_nothing_whole_is_left_are_no_examples(open_tiny):
    with open_tiny(examples=8) as runtime:
        cut = store_rated_reply(runtime, "how is tea made?", "with wat")
        runtime.store.db.execute("UPDATE replies SET finish_reason = 'length' WHERE id = ?", cut)
        gone = store_rated_reply(runtime, "how is tea made now?", "with milk")
        runtime.store.db.execute("UPDATE replies SET text = '', prompt = '' WHERE id = ?", gone)
        assert prompt_and_row(runtime, "how is tea made by you?")[1].examples == ()


def test_examples_work_without_learning(open_tiny):
    with open_tiny(examples=1, learn=False) as runtime:
        tea = store_rated_reply(runtime, "how is tea made?", "with water")
        assert prompt_and_row(runtime, "how is tea made by you?")[1].examples == (tea,)
        assert runtime.learner.micro.norm == 0


def test_a_number_of_examples_that_makes_no_sense_is_refused(open_tiny):
    with pytest.raises(UsageError, match="from 0"):
        open_tiny(examples=9)


def test_a_chat_with_examples_keeps_only_the_users_own_words(open_tiny, home):
    with open_tiny(examples=2) as runtime:
        store_rated_reply(runtime, "how is tea made?", "with water")
        session = runtime.chats.new_chat()
        for text in ("good day", "how is tea made by you?"):
            list(runtime.chats.say(session, text, max_new_tokens=3, cancel=threading.Event()))
        said = [t.content for t in runtime.chats.turns(session) if t.role == "user"]
        assert said == ["good day", "how is tea made by you?"]
        assert len(runtime.store.replies.get("last").examples) == 1
    store = Store(home / "ruvmlx.db")
    assert len(store.replies.examples_used(runtime.model.fingerprint)) == 1
    store.close()
