"""The sizes of messages in a context window."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from ruvmlx.engine import context_window
from ruvmlx.engine.context_window import (
    REST_LEFT_OUT,
    TEMPLATE_TOKENS,
    ContextWindow,
    Turn,
    as_messages,
    cut,
    first_measured,
    join_neighbours,
)
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.tool_calls import ParsedCall


@pytest.fixture
def encoded_texts(tiny, monkeypatch):
    """The texts that the tokenizer encodes."""
    seen, encode = [], tiny.tokenizer.encode
    monkeypatch.setattr(
        tiny.tokenizer,
        "encode",
        lambda text, **more: seen.append(text) or encode(text, **more),
        raising=False,
    )
    return seen


def test_of_a_long_chat_only_the_newest_messages_are_encoded(tiny, encoded_texts):
    """A context of 512 tokens holds at most 32 messages. A chat of 7,000 messages was encoded as a whole when
    it was opened, which took over a second, and once again for each reply."""
    window = ContextWindow(tiny)
    messages = [Message("user", f"message {n}") for n in range(7000)]
    first = window.fitting(messages, 8)
    assert len(encoded_texts) <= 2 * 32 + 1  # and the empty text of the tool calls
    known = len(encoded_texts)
    assert window.fitting([*messages, Message("user", "new")], 8)[0] in (first[0], messages[-1])
    assert encoded_texts[-1] == "new" and len(encoded_texts) == known + 1


@pytest.mark.parametrize("limit", [100, 333, 504])
def test_messages_that_are_too_old_to_fit_change_nothing_but_the_place_of_a_cut(limit):
    """`cut` of all sizes is the twin: the same in a short chat. In a long one the messages fit, fill half of
    the room, and begin with the same message for as many turns, but for one more cut in `many` messages."""
    rng = random.Random(limit)
    sizes = [TEMPLATE_TOKENS + rng.choice([0, 1, 9, 40, 90]) for _ in range(700)]
    sizes[:80] = [TEMPLATE_TOKENS] * 80  # nothing is smaller
    many, found, twins, begins = limit // TEMPLATE_TOKENS + 1, [], [], []
    for count in range(1, len(sizes)):
        begins.append(begin := first_measured(count, limit))
        found.append(begin + cut(sizes[begin:count], limit, limit // 2))
        twins.append(cut(sizes[:count], limit, limit // 2))
        kept = sum(sizes[found[-1] : count])
        assert kept <= limit or found[-1] == count - 1
        assert not found[-1] or kept + sizes[found[-1] - 1] > limit // 2
    assert found[: 2 * many - 1] == twins[: 2 * many - 1]
    back = [n for n in range(1, len(found)) if found[n] < found[n - 1]]
    assert all(begins[n] > begins[n - 1] for n in back) and len(set(begins)) <= len(sizes) // many
    assert _changes(found) <= _changes(twins) + 2 * len(set(begins))


def _changes(indices):
    return sum(a != b for a, b in itertools.pairwise(indices))


def test_the_kept_numbers_are_bounded(tiny, encoded_texts, monkeypatch):
    monkeypatch.setattr(context_window, "MAX_COUNTS", 5)
    window = ContextWindow(tiny)
    sizes = [window.message_size(Message("user", "a" * n)) for n in range(1, 30)]
    assert sizes == [n + 16 for n in range(1, 30)]  # a byte is a token of this model
    assert len(window._counts) == 5


@pytest.mark.parametrize("large", ["calls", "summary", ""])
def test_a_short_text_with_much_beside_it_is_measured(tiny, large):
    """Tool calls and a summary take room, too: what they push out is left out, as `fitting` says."""
    window, much = ContextWindow(tiny), "x" * tiny.context
    calls = (ParsedCall("a", "look", json.dumps({"words": much})),) if large == "calls" else ()
    turns = [Turn("user", "one"), Turn("assistant", "two"), Turn("user", "three")]
    if calls:
        turns += [
            Turn("assistant", "", calls=calls),
            Turn("tool", "found", calls=calls),
            Turn("user", "four"),
        ]
    summary = much if large == "summary" else ""
    gone = window.left_out(turns, 8, summary)
    assert bool(gone) is bool(large)


def an_exchange(*results):
    """A question, and for each result a call of a tool before the result."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    pairs = [(Message("assistant", "", (call,)), Message("tool", text, (), "a", "look")) for text in results]
    return [Message("user", "What do you see?"), *itertools.chain(*pairs)]


@pytest.fixture
def window(tiny):
    # a call takes 100 of these tokens, because a byte is a token of this model
    return ContextWindow(replace(tiny, shape=replace(tiny.shape, max_context=1024)))


@pytest.mark.parametrize("system", [[], [Message("system", "Be kind.")]])
@pytest.mark.parametrize("summary", ["", "The user looks."])
@pytest.mark.parametrize(
    "sizes", [(200, 200), (5, 700), (500, 60), (500, 400), (350, 250), (900, 60), (30, 2000)]
)
def test_tool_results_do_not_push_out_the_question(window, system, summary, sizes):
    """The question went, and the prompt had only the last result. Now the oldest results become shorter, as
    far as needed; a result that is as short as the words for what is left out stays as it is."""
    room = window.size - 128 - (window.message_size(Message("user", summary)) if summary else 0)
    older = [Message("user", "x" * 90), Message("assistant", "y" * 90)]
    asked = an_exchange(*(letter * size for letter, size in zip("ab", sizes, strict=True)))
    kept = window.fitting([*system, *older, *asked], 128, summary)
    if not summary and sum(sizes) == 400:
        assert kept == [*system, *older, *asked]
    kept = kept[len(kept) - len(asked) :]
    assert kept[0].content.endswith("What do you see?") and kept[1::2] == asked[1::2]
    over = sum(map(window.message_size, [*system, *asked])) - room
    assert sum(map(window.message_size, [*system, asked[0], *kept[1:]])) <= room
    cuts = []
    for now, before in zip(kept[2::2], asked[2::2], strict=True):
        begin = now.content.removesuffix(REST_LEFT_OUT).rstrip("\n")
        assert before.content.startswith(begin) and (now.tool_call_id, now.name) == ("a", "look")
        cuts.append(now != before)
        assert now.content.endswith(REST_LEFT_OUT) is cuts[-1]
    assert any(cuts) is (over > 0) and cuts[1] is (over > max(0, sizes[0] - len(REST_LEFT_OUT)))


@pytest.mark.parametrize("message", an_exchange("found")[1:])
def test_a_summary_changes_only_the_text_of_its_message(window, message):
    """On a branch without a question after the summary, this message lost its calls, or the id of its
    call."""
    (kept,) = window.fitting([message], 128, "The user looks.")
    assert kept == replace(message, content=kept.content) and "The user looks." in kept.content


def test_an_exchange_that_fits_is_whole(window):
    """`cut` leaves half of the room; an exchange of more than half, which fits, lost its question, too."""
    older, asked = [Message("user", "x" * 400), Message("assistant", "y" * 90)], an_exchange("a" * 400)
    assert window.fitting([*older, *asked], 128) == asked


def test_of_many_results_the_question_stays(window):
    """The results are more messages than the context has room for, so `first_measured` is past the
    question. Nothing can make them fit."""
    asked = an_exchange(*["a" * 50] * 100)
    kept = window.fitting(asked, 128)
    assert kept[0] == asked[0] and {m.content for m in kept[2::2]} == {REST_LEFT_OUT}


@pytest.mark.parametrize("length", [50, 200, 300, 400])
def test_a_long_system_prompt_leaves_room_for_the_reply(tiny, length):
    """The messages are cut to half of the room beside the system prompt, not of the whole context."""
    window, turns = ContextWindow(tiny), [Message("system", "s" * length)]
    for n in range(40):
        turns.append(Message("user", f"question {n}"))
        found = window.fitting(turns, 32)
        assert sum(map(window.message_size, found)) + 32 <= window.size and found[-1] == turns[-1]
        turns.append(Message("assistant", f"answer {n}"))


def test_questions_without_a_reply_can_be_left_out(tiny):
    """They become one message of the prompt, of which only the newest question must stay."""
    window, turns = ContextWindow(tiny), list[Turn]()
    for n in range(12):
        turns += [Turn("user", f"question {n} {'x' * 60}"), Turn("assistant", "")]
        found = join_neighbours(window.fitting(as_messages(turns[:-1]), 32))
        assert len(found) == 1 and found[0].content.endswith(turns[-2].content)
        assert window.message_size(found[0]) + 32 <= window.size
    gone = window.left_out(turns, 32)
    assert gone and found[0].content == "\n\n".join(t.content for t in turns[2 * len(gone) :: 2])


def test_a_chat_without_messages_has_nothing_to_leave_out(tiny):
    """Memory for KV caches that is about as small as the limit of a reply leaves no room for a prompt. The
    chat then asks, before the first message, what is left out."""
    window = ContextWindow(tiny, lambda: 120)
    system = Turn("system", "Be brief.")
    for turns in ([], [system], [system, Turn("user", "")]):
        assert window.left_out(turns, 128) == []
