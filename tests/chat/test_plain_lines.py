"""Lines that a person types at a terminal in plain mode."""

import io
import os
import sys
import termios

import pytest
from ruvmlx.apps.chat.interrupts import Interrupts
from ruvmlx.apps.chat.plain_streams import NO_KEYS, TERMINAL_LINE_BYTES, PlainStreams

from .test_branches import run_plain


@pytest.fixture
def terminal():
    """A function that types at a terminal, and the streams of plain mode that read it."""
    outer, inner = os.openpty()
    mode = termios.tcgetattr(inner)
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(inner, termios.TCSANOW, mode)

    def type_text(text):
        data = text.encode()
        for at in range(0, len(data), 256):
            os.write(outer, data[at : at + 256])

    with open(inner, encoding="utf-8", errors="replace") as source:
        yield type_text, PlainStreams(source, io.StringIO(), Interrupts())
    os.close(outer)


@pytest.mark.parametrize("key", ["\x1bOP", "\x1b[11~", "\x1b[[A"])
def test_f1_at_a_terminal_is_help_and_no_message(open_tiny, key):
    """A terminal sends the code ESC O P for the key F1. Plain mode shows the help, and sends no message
    "P" to the model."""
    with open_tiny() as runtime:
        _, said = run_plain(runtime, key)
        assert "/rate" in said and "Assistant:" not in said and runtime.chats.last_chat() is None


@pytest.mark.parametrize(("typed", "sent"), [("\x1bOA", ""), ("\x1b[1;5C \x1bOQ", ""), ("Hi\x1bOD!", "Hi!")])
def test_the_codes_of_keys_are_no_words(open_tiny, capsys, typed, sent):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        run_plain(runtime, typed, session=chat)
        assert [turn.content for turn in runtime.chats.turns(chat)][:1] == [sent][: bool(sent)]
    assert (NO_KEYS in capsys.readouterr().err) is not bool(sent)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems can keep the newline back, too")
@pytest.mark.parametrize("words", ["word " * 2000, "wörter " * 900, "a" * TERMINAL_LINE_BYTES])
def test_a_line_that_the_terminal_cut_is_not_sent(words, terminal, capsys):
    """The system drops the end of a pasted line, so the message would lack its last words."""
    type_text, streams = terminal
    type_text(f"{words}\n")
    assert streams.read("") == "\n"
    assert f"at most {TERMINAL_LINE_BYTES:,} bytes" in capsys.readouterr().err
    type_text("short\n")
    assert streams.read("") == "short\n" and not capsys.readouterr().err


def test_a_long_line_that_the_terminal_did_not_cut_is_whole(terminal):
    type_text, streams = terminal
    type_text("a" * 900 + "\n")
    assert streams.read("") == "a" * 900 + "\n"
    assert (
        PlainStreams(io.StringIO("b" * 9000 + "\n"), io.StringIO(), Interrupts()).read() == "b" * 9000 + "\n"
    )
