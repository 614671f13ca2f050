"""Slash commands."""

import pytest
from ruvmlx.apps.chat.commands import COMMANDS, Command, help_lines, message_text, parse, parse_rating

from ruvmlx.errors import UsageError


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/rate up", Command("rate", "up")),
        ("  /RATE 4 too long\n", Command("rate", "4 too long")),
        ("/up", Command("rate", "up")),
        ("/3 so so", Command("rate", "3 so so")),
        ("/+", Command("rate", "up")),
        ("/-", Command("rate", "down")),
        ("/undo", Command("undo")),
        ("/system You are\nbrief.", Command("system", "You are\nbrief.")),
        ("/q", Command("quit")),
        ("/?", Command("help")),
        ("/usr/bin is full", None),
        ("//undo", None),
        ("/ what?", None),
        ("/7", None),
        ("hello /undo", None),
        ("", None),
    ],
)
def test_parse(text, command):
    """A command is a slash and one known word; anything else is a message."""
    assert parse(text) == command


@pytest.mark.parametrize("text", ["/foo", "/undo now", "/quit please"])
def test_parse_refuses(text):
    """A wrong command is an error of one line, never a message to the model."""
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_an_escaped_slash_is_text():
    """ "//undo" sends "/undo"."""
    assert message_text("//undo") == "/undo"
    assert message_text("1/2") == "1/2"


def test_ratings():
    """up, down and 1 to 5, with a note after them."""
    assert parse_rating("up too  long ") == ("up", "too  long")
    assert parse_rating("5") == ("5", "")
    for wrong in ("", "6", "0", "great"):
        with pytest.raises(UsageError):
            parse_rating(wrong)


def test_help_fits_a_small_terminal():
    """Every command has its line, and 80 columns hold it."""
    lines = help_lines()
    assert len(lines) == len(COMMANDS)
    assert max(map(len, lines)) <= 72
