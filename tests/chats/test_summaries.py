"""The oldest messages of a chat are summed up, and the model reads the notes in their place."""

import threading
from dataclasses import replace

import pytest

from ruvmlx.chats.summaries import whole_sentences
from ruvmlx.engine.types import Chunk
from ruvmlx.errors import NotFound
from ruvmlx.models.config.model import Message

from ..test_runtime import say

QUESTIONS = [f"Number {n}: " + "word " * 12 for n in range(8)]  # 512 tokens of context have no room for all

LIMIT = 8  # the maximum number of tokens of a reply


@pytest.fixture
def summary_prompts(monkeypatch):
    """What the model is asked to sum up; its notes are "note 1", "note 2" ..."""
    from ruvmlx.engine.engine import LLMInferenceEngine

    asked, stream = list[str](), LLMInferenceEngine.stream

    def stream_notes(self, request, adapter=None, recorder=None):
        if "Write down in at most" not in request.messages[0].content:
            yield from stream(self, request, adapter, recorder)
            return
        assert request.untouched and request.sampling.temperature == 0
        asked.append(request.messages[0].content)
        self.prompt_ids(request)  # it fits the context
        small = replace(request, messages=[Message("user", "hi")], max_new_tokens=1, cancel=threading.Event())
        [last] = [chunk for chunk in stream(self, small) if chunk.response]
        yield Chunk("note", 1)
        yield Chunk("", 1, response=replace(last.response, text=f"note {len(asked)}", finish_reason="stop"))

    monkeypatch.setattr(LLMInferenceEngine, "stream", stream_notes)
    return asked


def talk(runtime, questions=QUESTIONS):
    chat = runtime.chats.new_chat("Be brief.")
    for question in questions:
        say(runtime, chat, question, n=LIMIT)
    return chat


def summarize(runtime, chat, cancel=None):
    return list(runtime.chats.summaries.write(chat, cancel or threading.Event(), LIMIT))


def test_the_model_reads_the_notes_in_place_of_the_oldest(open_tiny, summary_prompts):
    """What is not in the notes is read itself; what the notes replace is marked as left out, and stays."""
    with open_tiny() as runtime:
        chat = talk(runtime)
        before = runtime.chats.turns(chat)
        summarize(runtime, chat)
        summary = runtime.chats.summaries.of(chat)
        assert summary.text == f"note {len(summary_prompts)}" and 0 < summary.count <= len(before) - 5
        assert runtime.chats.turns(chat) == before
        say(runtime, chat, "What now?", n=LIMIT)
        prompt = runtime.chats.prompt_text(chat)
        assert f"(What was said before, in short: {summary.text})" in prompt and "Be brief." in prompt
        gone = runtime.chats.left_out(chat, LIMIT)
        spoken = [turn for turn in runtime.chats.turns(chat) if turn.role == "user"]
        assert [turn.id in gone for turn in spoken] == [turn.content not in prompt for turn in spoken]
        assert set(turn.id for turn in before[1 : 1 + summary.count]) <= gone
        told = "\n".join(summary_prompts)
        assert all(turn.content in told for turn in before[1 : 1 + summary.count] if turn.content)


def test_a_second_summary_takes_the_first_one_in_and_a_full_context_keeps_it(open_tiny, summary_prompts):
    with open_tiny() as runtime:
        chat = talk(runtime)
        summarize(runtime, chat)
        first, count = runtime.chats.summaries.of(chat), len(summary_prompts)
        for question in QUESTIONS:
            say(runtime, chat, f"Again {question}", n=LIMIT)
            assert first.text in runtime.chats.prompt_text(chat)
        summarize(runtime, chat)
        assert (
            f"Before: {first.text}" in summary_prompts[count] and QUESTIONS[0] not in summary_prompts[count]
        )
        assert runtime.chats.summaries.of(chat).count > first.count


def test_another_branch_has_its_own_messages(open_tiny, summary_prompts):
    """On a branch without the last message that was summed up, all is read itself; so it is after
    forgetting."""
    with open_tiny() as runtime:
        chat = talk(runtime)
        summarize(runtime, chat)
        asked = next(turn for turn in runtime.chats.turns(chat) if turn.role == "user")
        head = runtime.store.messages.head(chat)
        for _ in runtime.chats.say(
            chat, "Another start", max_new_tokens=4, cancel=threading.Event(), instead_of=asked.id
        ):
            pass
        assert runtime.chats.summaries.of(chat).count == 0 and "in short" not in runtime.chats.prompt_text(
            chat
        )
        runtime.store.messages.set_head(chat, head)
        assert runtime.chats.summaries.of(chat).count > 0
        runtime.chats.summaries.forget(chat)
        say(runtime, chat, "What now?", n=LIMIT)
        assert runtime.chats.summaries.of(chat).count == 0 and "in short" not in runtime.chats.prompt_text(
            chat
        )


def test_a_stop_changes_nothing_and_a_short_chat_is_refused(open_tiny, summary_prompts):
    with open_tiny() as runtime:
        chat, stopped = talk(runtime), threading.Event()
        stopped.set()
        summarize(runtime, chat, stopped)
        assert runtime.chats.summaries.of(chat).count == 0
        with pytest.raises(NotFound, match="nothing to sum up yet"):
            summarize(runtime, talk(runtime, ["Hello"]))


def test_a_message_longer_than_the_context_is_cut_for_the_notes(open_tiny, summary_prompts):
    """It was imported, or another model read it."""
    with open_tiny() as runtime:
        store = runtime.store
        chat = store.chats.new("m")
        for n in range(4):
            store.messages.add_user(chat, "endless " * 2000 if n == 0 else f"question {n}")
            store.messages.append(chat, "assistant", f"answer {n}", None, 1.0)
        summarize(runtime, chat)
        assert "endless" in summary_prompts[0] and runtime.chats.summaries.of(chat).text


@pytest.mark.parametrize("sizes", [(340, 20), (220, 220), (20, 310, 9), (200, 5, 5, 200)])
def test_what_is_offered_is_done(open_tiny, summary_prompts, sizes):
    """After each reply, a summary is offered exactly if one can be written. A message that the model does not
    read can always be summed up, also one of the newest four. After the notes the model reads all others."""
    offered = []
    for count in range(1, len(sizes) + 1):
        with open_tiny() as runtime:
            chat = talk(runtime, [f"{n} {'x' * size}" for n, size in enumerate(sizes[:count])])
            before = runtime.chats.room(chat, runtime.chats.turns(chat), LIMIT)
            assert before.can_sum_up or not before.unread
            offered.append((before.can_sum_up, before.unread > 0))
            if not before.can_sum_up:
                with pytest.raises(NotFound, match="the model reads all messages themselves"):
                    summarize(runtime, chat)
                continue
            summarize(runtime, chat)
            after = runtime.chats.room(chat, runtime.chats.turns(chat), LIMIT)
            assert after.summed_up >= len(before.left_out) and after.unread == 0
    if sizes == (340, 20):
        assert offered == [(False, False), (True, False)]
    if sizes == (220, 220):
        assert offered == [(False, False), (True, True)]  # two of four messages


@pytest.mark.parametrize(
    ("notes", "kept"),
    [
        ("He goes to Rome. He wants a hot", "He goes to Rome."),
        ("- Rome\n- 3.5 days\n- a hot", "- Rome\n- 3.5 days"),
        ("He goes to Rome, because", "He goes to Rome, because"),
        ("Is it Rome? Yes! He", "Is it Rome? Yes!"),
        ("", ""),
    ],
)
def test_notes_that_were_cut_end_with_a_whole_sentence(notes, kept):
    assert whole_sentences(notes) == kept


def test_notes_at_the_limit_are_stored_without_their_cut_sentence(open_tiny, monkeypatch):
    """The notes are cut by the number of tokens in the middle of their second sentence."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        for question in QUESTIONS:
            say(runtime, chat, question)
        response = replace(say(runtime, chat, "More?"), text="It is Rome. It is a", finish_reason="length")
        monkeypatch.setattr(
            runtime.chats.summaries._engine, "stream", lambda _: iter([Chunk("", response=response)])
        )
        list(runtime.chats.summaries.write(chat, threading.Event(), 8))
        assert runtime.chats.summaries.of(chat).text == "It is Rome."
