"""The sizes of messages in a context window."""

import json

import pytest

from ruvmlx.engine import context_window
from ruvmlx.engine.context_window import ContextWindow, Turn
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


def test_a_long_chat_is_encoded_once(tiny, encoded_texts):
    """Each reply needs all sizes. A chat of 7,000 messages was encoded again for each reply: 1.4 s."""
    window = ContextWindow(tiny)
    messages = [Message("user", f"message {n}") for n in range(7000)]
    first = window.fitting(messages, 8)
    assert len(encoded_texts) == 7000 + 1  # and the empty text of the tool calls
    assert window.fitting([*messages, Message("user", "new")], 8)[0] in (first[0], messages[-1])
    assert encoded_texts[-1] == "new" and len(encoded_texts) == 7000 + 2


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
