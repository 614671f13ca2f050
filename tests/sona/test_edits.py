"""A reply that the user edits: a branch of its own, which is preferred to the original."""

import threading
from dataclasses import replace

import pytest

from ruvmlx.errors import NotFound, RuvmlxError, StoreBusy, UsageError
from ruvmlx.sona.edited_reply import edited_reply

from ..test_runtime import say
from .feedback import chat_with_reply, reply


@pytest.mark.parametrize("text,why", [("  \n", "empty"), ("x" * 5000, "context")])
def test_an_edit_that_cannot_be_used_saves_nothing(open_tiny, text, why):
    with open_tiny() as runtime:
        chat, message = chat_with_reply(runtime)
        before = runtime.chats.turns(chat)
        with pytest.raises(UsageError, match=why):
            runtime.chats.edit_reply(chat, message, text)
        with pytest.raises(UsageError, match="same as before"):
            runtime.chats.edit_reply(chat, message, before[-1].content)
        assert runtime.chats.turns(chat) == before and runtime.status().preferences == 0


# -- edits ---------------------------------------------------------------------------------------------------


def test_an_edit_is_a_branch_of_its_own_and_is_preferred_to_the_original(open_tiny):
    with open_tiny() as runtime:
        chat, message = chat_with_reply(runtime)
        original = runtime.chats.turns(chat)[-1]
        edited = runtime.chats.edit_reply(chat, message, "hello, short")
        shown = runtime.chats.turns(chat)[-1]
        assert (shown.content, shown.branch, shown.branches) == ("hello, short", 2, 2)
        assert shown.id == edited.message and shown.reply_id == edited.reply_id
        learned = edited.preference
        assert (learned.better, learned.worse) == (edited.reply_id, original.reply_id)
        assert (learned.kind, learned.strength) == (
            "edit",
            1.0,
        ) and learned.margin_after > learned.margin_before
        row = runtime.store.replies.get(edited.reply_id)
        assert row.edited == original.reply_id and row.finish_reason == "stop" and row.features
        assert row.sampled_ids[-1] in runtime.model.tokenizer.eos_ids
        assert runtime.model.tokenizer.decode(row.sampled_ids) == "hello, short"
        runtime.chats.next_sibling(chat, -1)
        assert runtime.chats.turns(chat)[-1].content == original.content


def test_an_edit_of_a_continued_reply_teaches_the_new_words_alone(open_tiny):
    """The continued reply's prompt ends with its first part, which the user's text replaces."""
    with open_tiny() as runtime:
        chat, _ = chat_with_reply(runtime)
        first = runtime.store.replies.get(runtime.chats.turns(chat)[-1].reply_id)
        for _ in runtime.chats.continue_reply(chat, max_new_tokens=8, cancel=threading.Event()):
            pass
        continued = runtime.chats.turns(chat)[-1]
        assert continued.content.startswith(first.text) and len(continued.content) > len(first.text)
        edited = runtime.chats.edit_reply(chat, continued.id, "my own words")
        row = runtime.store.replies.get(edited.reply_id)
        decode = runtime.model.tokenizer.decode
        assert decode(row.prompt_ids).rstrip() == decode(first.prompt_ids).rstrip()
        assert decode(row.sampled_ids) == "my own words"


def test_a_chat_goes_on_from_the_users_version(open_tiny):
    with open_tiny() as runtime:
        chat, message = chat_with_reply(runtime)
        edited = runtime.chats.edit_reply(chat, message, "my own words")
        say(runtime, chat, "and then?")
        asked = runtime.store.replies.get(runtime.chats.turns(chat)[-1].reply_id)
        assert "my own words" in runtime.model.tokenizer.decode(asked.prompt_ids)
        assert runtime.status().preferences == 1  # going on after an edit says nothing new
        runtime.undo()
        assert runtime.chats.turns(chat)[1].id == edited.message  # the words stay


def test_an_edit_outside_of_chats_and_by_the_id_of_a_reply_in_one(open_tiny):
    with open_tiny() as runtime:
        alone = runtime.choices.edit(reply(runtime), "brief")
        assert alone.message is None and alone.preference.applied
        chat, _ = chat_with_reply(runtime)
        found = runtime.choices.edit(runtime.chats.turns(chat)[-1].reply_id, "brief")
        assert runtime.chats.turns(chat)[-1].id == found.message


def test_without_an_adapter_an_edit_is_saved_and_nothing_is_learned(open_tiny):
    with open_tiny(adapter=None) as runtime:
        chat, message = chat_with_reply(runtime)
        edited = runtime.chats.edit_reply(chat, message, "mine")
        assert edited.preference is None and runtime.chats.turns(chat)[-1].content == "mine"
        with pytest.raises(NotFound):
            runtime.choices.rewrite(edited.reply_id, "again")
        assert runtime.chats.turns(chat)[-1].content == "mine"


def test_an_edit_that_fails_leaves_the_chat_as_it_was(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        chat, message = chat_with_reply(runtime)
        before = runtime.chats.turns(chat)

        def fail(*_):
            raise StoreBusy("locked")

        monkeypatch.setattr(runtime.store.witness, "record", fail)
        with pytest.raises(StoreBusy):
            runtime.chats.edit_reply(chat, message, "mine")
        assert runtime.chats.turns(chat) == before


def test_an_edit_is_kept_when_learning_from_it_fails(open_tiny, monkeypatch):
    """An error would make the user save the same version again."""
    with open_tiny() as runtime:
        chat, message = chat_with_reply(runtime)

        def fail(*_):
            raise StoreBusy("locked")

        monkeypatch.setattr(runtime.learner, "commit_preference", fail)
        edited = runtime.chats.edit_reply(chat, message, "mine")
        assert edited.preference is None and "is saved" in edited.failure and "locked" in edited.failure
        shown = runtime.chats.turns(chat)[-1]
        assert (shown.content, shown.branches) == ("mine", 2) and runtime.status().preferences == 0
        with pytest.raises(RuvmlxError, match="is saved"):
            runtime.choices.rewrite(edited.reply_id, "other")


def test_a_reply_of_a_deleted_chat_cannot_be_rewritten(open_tiny):
    """Its words would outlive the chat."""
    with open_tiny() as runtime:
        chat, _ = chat_with_reply(runtime)
        original = runtime.chats.turns(chat)[-1].reply_id
        runtime.store.chats.soft_delete(chat)
        with pytest.raises(NotFound, match="chat was deleted"):
            runtime.choices.edit(original, "mine")
        assert runtime.store.replies.get("last").id == original


def test_an_edited_reply_can_be_rated_and_edited_again(open_tiny):
    with open_tiny() as runtime:
        chat, message = chat_with_reply(runtime)
        first = runtime.chats.edit_reply(chat, message, "first version")
        assert runtime.rate(first.reply_id, "up").applied
        second = runtime.chats.edit_reply(chat, first.message, "second version")
        assert runtime.chats.turns(chat)[-1].branches == 3
        assert second.preference.worse == first.reply_id and runtime.status().preferences == 2


def test_an_unchanged_reply_is_no_edit_although_the_input_shows_it_differently(open_tiny):
    """The chat's input line turns unusual line breaks into usual ones, and has no control characters."""
    with open_tiny() as runtime:
        original = replace(runtime.store.replies.get(reply(runtime)), text="one\u2028two\x07three")
        with pytest.raises(UsageError, match="same as before"):
            edited_reply(runtime.model.tokenizer, original, "one\ntwothree")
        assert edited_reply(runtime.model.tokenizer, original, "one\ntwo three").text == "one\ntwo three"


def test_a_reply_without_an_answer_cannot_be_rewritten(open_tiny):
    with open_tiny() as runtime:
        original = runtime.store.replies.get(reply(runtime))
        with pytest.raises(UsageError, match="ended inside its thought"):
            edited_reply(runtime.model.tokenizer, replace(original, text="<think>so far"), "my answer")
