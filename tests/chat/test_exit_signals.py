"""The app is ended by a signal or by closing the window: the conversation is kept."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from .terminal import Terminal

PROGRAM = """
import sys
import time
from pathlib import Path
from ruvmlx.apps.chat import run_chat
from tests.chat.scripted import ScriptedRuntime

runtime = ScriptedRuntime(["one ", "two ", "three "], gate=True)
close = runtime.close
def tell():
    with open({kept!r}, "w") as kept:
        print([(t.content, t.finish_reason) for t in runtime.spoken["s1"]], file=kept)
    close()
runtime.close = tell
sys.exit(run_chat(lambda: runtime))
"""


@pytest.fixture
def kept_file(tmp_path):
    return tmp_path / "kept"


@pytest.fixture
def terminal(kept_file):
    """A terminal with the app in the middle of a reply."""
    terminal = Terminal([sys.executable, "-c", PROGRAM.format(kept=str(kept_file))])
    terminal.expect("learns from what you think")
    terminal.send("Hi\r")
    terminal.expect("two")
    return terminal


PARTIAL = "[('Hi', None), ('one two ', 'cancelled')]\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_the_reply_restores_the_screen_and_names_itself_in_the_exit_code(
    terminal, kept_file, signum
):
    """The partial reply is committed, the screen is left as it was, the exit code names the signal."""
    os.kill(terminal.pid, signum)
    assert terminal.wait() == 128 + signum
    assert kept_file.read_text() == PARTIAL
    assert b"\x1b[?1049l" in terminal.raw
    assert "Traceback" not in terminal.seen


def test_closing_the_window_keeps_the_reply_and_ends_the_process(terminal, kept_file):
    """There is nothing left to draw on; the reply is kept, and the process is gone."""
    os.close(terminal.fd)
    status = os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1])
    assert kept_file.read_text() == PARTIAL
    assert status == 128 + signal.SIGHUP


def test_quitting_during_a_reply_exits_with_0(terminal, kept_file):
    """Ctrl+Q in a reply: 0."""
    terminal.send("\x11")
    assert terminal.wait() == 0
    assert kept_file.read_text() == PARTIAL


def send_all_that_is_taken(terminal, data, pause=2.0):
    """Send until all is sent, or nothing was taken for a while. Returns the number of bytes."""
    os.set_blocking(terminal.fd, False)
    sent, until = 0, time.monotonic() + pause
    while sent < len(data) and time.monotonic() < until:
        terminal._read()
        try:
            sent += os.write(terminal.fd, data[sent : sent + 4096])
            until = time.monotonic() + pause
        except BlockingIOError:
            pass
    os.set_blocking(terminal.fd, True)
    return sent


def most_memory(pid):
    """Bytes that a process has had at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory of a process")
def test_a_flood_of_keys_takes_no_memory_and_no_signal_waits_for_it(terminal):
    """The app reads keys at its own pace; those that it has not read end with it."""
    before = most_memory(terminal.pid)
    send_all_that_is_taken(terminal, b"x" * 300_000)
    assert most_memory(terminal.pid) - before < 50 << 20
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.wait() == 128 + signal.SIGTERM


def test_the_screen_is_drawn_while_errors_go_to_a_file(kept_file, tmp_path):
    """`chat 2>FILE`"""
    file = tmp_path / "errors"
    program = PROGRAM.format(kept=str(kept_file))
    terminal = Terminal(["sh", "-c", f'exec "$0" -c "$1" 2>"{file}"', sys.executable, program])
    terminal.expect("learns from what you think", 60)
    terminal.send("\x11")  # Ctrl+Q
    assert terminal.wait(60) == 0 and file.read_text() == ""
