"""Lines end between words, and a command in backquotes stays on one line."""

import io

import pytest
from ruvmlx.apps.wrapping import width, wrap, wrap_for, wrap_rows

SENTENCE = (
    "The adapter is at version 2. `ruvmlx learn undo` takes the last rating back; `learn rollback V` too."
)


@pytest.mark.parametrize("columns", range(20, 110))
def test_a_line_fits_and_a_command_stays_whole(columns):
    lines = wrap(SENTENCE, columns).split("\n")
    assert all(len(line) <= columns and line == line.strip() for line in lines)
    assert all(line.count("`") % 2 == 0 for line in lines)
    assert " ".join(lines) == SENTENCE


def test_a_command_that_is_too_long_has_a_line_of_its_own():
    command = "`ruvmlx restore a-very-long-name-of-a-file.db`"
    assert wrap(f"It is gone. {command} uses it again.", 30).split("\n") == [
        "It is gone.", command, "uses it again.",
    ]  # fmt: skip


def test_a_number_and_its_unit_stay_together():
    assert wrap("The cache takes 279 MB here.", 20).split("\n") == ["The cache takes", "279 MB here."]


def test_wide_letters_take_two_columns():
    assert wrap("日本語 日本語 日本語", 14).split("\n") == ["日本語 日本語", "日本語"]


def test_the_further_parts_of_a_line_are_indented():
    assert wrap("  one  two three\nfour", 11, hang=3) == "  one  two\n     three\nfour"


def test_a_line_that_fits_keeps_its_spaces():
    assert wrap("a  b\n\n   c ", 11) == "a  b\n\n   c "


def test_the_width_is_that_of_the_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert width(None) > 1000
    monkeypatch.setenv("COLUMNS", "70")
    assert width(None) == 70


TABLE = """Ctrl+Y  rate the reply up and learn from it
日本    the same for a wide word

A line  with two spaces that is no row of a table stays as it is."""


def test_the_further_parts_of_a_row_stand_below_its_text():
    assert wrap_rows(TABLE, 30).split("\n") == [
        "Ctrl+Y  rate the reply up and",
        "        learn from it",
        "日本    the same for a wide",
        "        word",
        "",
        TABLE.split("\n")[-1],
    ]


def test_the_text_of_a_row_begins_below_its_word_if_there_is_little_room():
    assert wrap_rows(TABLE, 26).split("\n")[:5] == [
        "Ctrl+Y",
        "    rate the reply up and",
        "    learn from it",
        "日本",
        "    the same for a wide",
    ]


@pytest.mark.parametrize("columns", [60, 2000])
def test_a_row_that_fits_stays_as_it_is(columns):
    assert wrap_rows(TABLE, columns) == TABLE


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_broken_rows_and_sentences(monkeypatch, is_terminal):
    """The /help of plain mode gets them, too. A file gets whole lines."""
    monkeypatch.setenv("COLUMNS", "30")
    sink = io.StringIO()
    sink.isatty = lambda: is_terminal
    wanted = wrap(wrap_rows(TABLE, 30), 30) if is_terminal else TABLE
    assert wrap_for(TABLE, sink) == wanted
