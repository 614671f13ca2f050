"""Thoughts at the beginning of a reply: told from the answer in whole texts, in streams, token by token."""

import pytest

from ruvmlx.models.text.thinking import AnswerFilter, Thought, ThoughtCounter, opened_by, split
from ruvmlx.models.text.tokenizer_base import is_special

TEXTS = {
    "no thought": ("Hello <b>there</b>", Thought("", "Hello <b>there</b>")),
    "closed": ("<think>\nhm, hm\n</think>\n\nYes.", Thought("hm, hm", "Yes.")),
    "Magistral's tags": ("[THINK]why[/THINK]So.", Thought("why", "So.")),
    "still open": ("<think>and then", Thought("and then", "", True)),
    "empty": ("<think>\n\n</think>\n\nYes.", Thought("", "Yes.")),
    "space before it": ("\n <think>a</think>b", Thought("a", "b")),
    "a tag in the answer": ("<think>a</think>b <think>c</think>", Thought("a", "b <think>c</think>")),
    "a tag that comes late": ("Well, <think>a</think>", Thought("", "Well, <think>a</think>")),
    "another tag's end": ("<think>a[/THINK]b</think>c", Thought("a[/THINK]b", "c")),
    "nothing": ("", Thought("", "")),
}


class Letters:
    """A tokenizer with a token for each letter."""

    def token_bytes(self, token):
        return chr(token).encode()

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("name", TEXTS)
def test_split(name):
    text, expected = TEXTS[name]
    assert split(text) == expected


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_shows_the_answer_alone(name, size):
    text, expected = TEXTS[name]
    stream = AnswerFilter()
    shown = "".join(stream.feed(text[i : i + size]) for i in range(0, len(text), size)) + stream.flush()
    assert shown == expected.answer and stream.is_thinking == expected.is_open


@pytest.mark.parametrize("name", TEXTS)
def test_a_counter_counts_the_thoughts_tokens(name):
    """A letter a token: the tags are several tokens here."""
    text, expected = TEXTS[name]
    counter = ThoughtCounter(Letters())
    for letter in text:
        counter.add(ord(letter))
    assert counter.in_thought == expected.is_open
    rest = text[counter.tokens :]
    assert rest.lstrip() == expected.answer.lstrip() if not expected.is_open else not rest


def test_a_thought_that_the_prompt_opened():
    def prompt(text):
        return [ord(letter) for letter in text]

    assert opened_by(Letters(), prompt("hi<think>\n")) == "<think>\n"
    assert opened_by(Letters(), prompt("<think>hi")) == opened_by(Letters(), prompt("</think>\n\n")) == ""
    counter = ThoughtCounter(Letters(), "<think>\n")
    assert counter.in_thought and counter.tokens == 0
    for letter in "ab</think>c":
        counter.add(ord(letter))
    assert counter.tokens == len("ab</think>") and not counter.in_thought


def test_tags_are_text_whatever_a_file_calls_them():
    assert not is_special("[THINK]", True) and not is_special("</think>", True)
    assert is_special("[INST]", False) and is_special("anything", True)
