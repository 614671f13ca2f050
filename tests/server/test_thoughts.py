"""The stream of thought and answer against its slow twin, `split`."""

import random

import pytest
from ruvmlx.apps.server.thoughts import ThoughtStream

from ruvmlx.models.text.thinking import split

TEXTS = [
    "", " ", "<", "plain answer", "  plain answer ", "<thin", "<think", "<think>", "<think>a", "< think>a",
    "<think>\nabc def\n</think>\n\nThe answer </think> is <think> 4.\n", "<think></think>x",
    "<think>  </think>  ",
    "\n <think>a < b </thin </think>ok", "[THINK]why[/THINK]because", "[THINK]a </think> b", "<think>a\n\n",
    "<thinking>no tag</thinking>", "a <think>b</think> c", "<think>a  b </think> c ", "<think>a <",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(8))
def test_pieces_joined_are_the_whole(text, seed):
    draw, stream, told, rest = random.Random(seed), ThoughtStream(), ["", ""], text
    while rest:
        size = draw.randint(1, 1 + seed)
        pieces, rest = stream.feed(rest[:size]), rest[size:]
        told = [have + piece for have, piece in zip(told, pieces, strict=True)]
    told = [have + piece for have, piece in zip(told, stream.flush(), strict=True)]
    whole = split(text)
    assert told == [whole.thought, whole.answer]


def test_nothing_is_held_back_without_need():
    """An answer streams at once, a thought but for its last space."""
    stream = ThoughtStream()
    assert stream.feed("Hel") == ("", "Hel")
    stream = ThoughtStream()
    assert stream.feed("<think>one two ") == ("one two", "")
    assert stream.feed("three</th") == (" three", "")
    assert stream.feed("ink> Four") == ("", "Four")


def test_raw():
    stream = ThoughtStream(split=False)
    assert stream.feed(" <think>a") == ("", " <think>a") and stream.flush() == ("", "")
