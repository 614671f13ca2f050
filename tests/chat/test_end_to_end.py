"""The whole program with the starter model, driven through a pseudo-terminal as a user would."""

import os
import subprocess
import sys

import pytest

from ruvmlx.store import Store

from .terminal import Terminal

CHAT = [sys.executable, "-m", "ruvmlx", "chat", "--temp", "0"]


@pytest.fixture
def chat(starter_file, home):
    """Starts `ruvmlx chat` in the test's own data folder."""
    return lambda *flags: Terminal([*CHAT, *flags], RUVMLX_HOME=str(home))


def test_type_stream_stop_rate_quit_continue(chat):
    """A question is answered and rated, a long reply is stopped; the next run goes on with the chat."""
    terminal = chat("--max-tokens", "400")
    terminal.expect("SmolLM2.* learns from what you think")
    terminal.send("What is the capital of France?\r")
    terminal.expect("Paris")
    terminal.expect("Choose")
    terminal.send("\x19")  # Ctrl+Y
    terminal.expect("▲ good · Learned: more like this. Ctrl\\+R takes it back")
    terminal.send("Write a long story about the sea.\r")
    terminal.expect("Stop")
    terminal.expect("tokens/s")
    terminal.send("\x1b")
    terminal.expect("stopped")
    terminal.send("\x11")  # Ctrl+Q
    assert terminal.wait() == 0

    again = chat("-c")
    again.expect("What is the capital of France")
    again.expect("Paris")
    again.expect("▲ good")
    again.expect("Write a long story about the sea")
    again.expect("stopped")
    again.send("\x12")  # Ctrl+R takes back the rating of the last run
    again.expect("”; 0 left, version 0")
    again.send("/quit\r")
    assert again.wait() == 0


def test_again_search_and_session(chat, home):
    """In a terminal: a second reply, flipped back to the first; the chat is found, renamed, opened by id."""
    terminal = chat("--max-tokens", "24")
    terminal.expect("SmolLM2.* learns from what you think")
    terminal.send("What is the capital of France?\r")
    terminal.expect("Paris")
    terminal.expect("Write again|Chats")
    terminal.send("\x07")  # Ctrl+G
    terminal.expect("‹ 2/2 ›")
    terminal.send("/prev\r")
    terminal.expect("‹ 1/2 ›")
    terminal.send("\x0f")  # Ctrl+O
    terminal.expect("Search all chats")
    terminal.send("capital fran\x14")  # Ctrl+T
    terminal.expect("Save the title")
    terminal.send(" Really\r")
    terminal.expect("Open +.t Rename")
    terminal.send("\x1b")
    terminal.expect("Send")
    terminal.send("\x11")
    assert terminal.wait() == 0
    store = Store(home / "ruvmlx.db")
    (session,) = store.chats.all()
    assert session.title == "What is the capital of France? Really" and session.turns == 2
    again = chat("--session", session.id[:8])
    again.expect("‹ 1/2 ›")
    again.send("\x11")
    assert again.wait() == 0


def test_plain_in_a_pipe(starter_file, home):
    """`echo ... | ruvmlx chat` falls back to the linear mode."""
    done = subprocess.run(
        [*CHAT, "--max-tokens", "20"],
        input="What is the capital of France?\n/down\n",
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"RUVMLX_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Assistant: ")
    assert "Paris" in done.stdout
    assert "Rated bad. Learned: less like this. /undo takes it back" in done.stdout
    assert "\x1b" not in done.stdout
