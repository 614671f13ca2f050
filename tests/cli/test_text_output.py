"""Text for people: it fits the terminal, is one line a row in a pipe, and cannot control the terminal."""

import subprocess
import time

import pytest
from ruvmlx.apps.cli import text_output
from ruvmlx.apps.cli.text_output import (
    TableColumn,
    ago,
    count,
    facts,
    say,
    shell_path,
    short_path,
    table,
    time_left,
)

from ruvmlx.text import size

COLUMNS = [TableColumn("NAME"), TableColumn("SIZE", right=True), TableColumn("TITLE", cut=True)]
ROWS = [("one", "2.8 MB", "A short title"), ("another name", "97 MB", "words " * 60)]


@pytest.fixture(params=[40, 80, 120])
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def test_a_table_fits_and_its_columns_are_aligned(width, capsys):
    table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(len(line) <= width for line in lines)
    ends = [
        line.index(text) + len(text) for line, text in zip(lines, ("SIZE", "2.8 MB", "97 MB"), strict=True)
    ]
    assert len(set(ends)) == 1
    assert lines[2].endswith("…")


def test_sentences_are_wrapped_at_words(width, capsys):
    say("a sentence of some words, " * 20)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and all(len(line) <= width for line in lines)
    assert " ".join(lines).split() == ("a sentence of some words, " * 20).split()


def test_in_a_pipe_a_row_is_one_line(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    say("a sentence of some words, " * 20)
    table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "…" not in "".join(lines)


def test_facts_wrap_beside_their_names(width, capsys):
    facts([("folder", "/a/path"), ("meaning", "words " * 30)])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    assert lines[0].split() == ["folder", "/a/path"]
    assert all(line.startswith(" " * len("meaning ")) for line in lines[2:])


def test_a_path_is_copied_from_one_line(width, capsys):
    """A path that is longer than a line stands whole on a line of its own."""
    path = "/folder" * 25
    facts([("name", "short"), ("file", path)])
    assert path in [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_what_is_quoted_cannot_control_the_terminal(capsys):
    say("a title \x1b[2J\x1b]0;t\x07 of a chat")
    table([TableColumn("A")], [("x\x1b[31m\ny",)])
    assert "\x1b" not in (out := capsys.readouterr().out) and out.splitlines()[-1] == "x y"


def test_colours_are_for_terminals_that_want_them(monkeypatch, capsys):
    """A terminal gets colours; NO_COLOR, a dumb terminal and a pipe get none."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert text_output._colour() is False
    monkeypatch.setattr(text_output, "is_terminal", lambda: True)
    assert text_output._colour() is True
    monkeypatch.setenv("TERM", "dumb")
    assert text_output._colour() is False
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert text_output._colour() is False


def test_words_for_numbers(monkeypatch, tmp_path):
    assert [count(1, "chat"), count(1204, "chat"), count(2, "reply", "replies")] == [
        "1 chat", "1,204 chats", "2 replies",
    ]  # fmt: skip
    sizes = {
        900: "900 B", 2.8e6: "2.8 MB", 9.96e6: "10 MB", 97e6: "97 MB", 999.6e6: "1.0 GB", 1.23e9: "1.2 GB",
        17.2e9: "17.2 GB", 141e9: "141 GB", 2048: "2.0 kB",
    }  # fmt: skip
    assert {n: size(n) for n in sizes} == sizes
    now = time.time()
    assert [ago(now - s) for s in (3, 130, 7300, 90000)] == [
        "just now", "2 minutes ago", "2 hours ago", "1 day ago",
    ]  # fmt: skip
    assert ago(86400 * 365).count("-") == 2
    monkeypatch.setenv("HOME", str(tmp_path))
    assert short_path(tmp_path / "x") == "~/x" and short_path("/usr/x") == "/usr/x"


@pytest.mark.parametrize(
    ("seconds", "words"), [(86000, "23 hours"), (7000, "1 hour"), (3000, "50 minutes"), (-5, "1 minute")]
)
def test_the_time_that_is_left_is_one_unit(seconds, words, monkeypatch):
    """A time in the past, which the next start ends, has the least time."""
    monkeypatch.setattr(text_output.time, "time", lambda: 1000.5)
    assert time_left(1000 + seconds) == words


@pytest.mark.parametrize("name", ["plain", "Library/Application Support/ruvmlx.db", "it's $HOME", "~"])
@pytest.mark.parametrize("in_home", [True, False])
def test_a_path_in_a_printed_command_is_one_word_of_the_shell(name, in_home, tmp_path, monkeypatch):
    """The data folder of macOS has a space in its name."""
    monkeypatch.setenv("HOME", str(tmp_path / ("a" if in_home else "b")))
    path = f"{tmp_path}/a/{name}"
    said = subprocess.run(["sh", "-c", f"printf '<%s>' {shell_path(path)}"], capture_output=True, text=True)
    assert said.stdout == f"<{path}>"
    assert shell_path(path).startswith("~/") == in_home
