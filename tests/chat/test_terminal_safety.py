"""What really reaches a terminal when model, its name and a paste are hostile: raw output on a pty."""

import re
import sys

import pytest

from .terminal import Terminal

PROGRAM = r"""
import sys
from ruvmlx.apps.chat import run_chat
from tests.chat.scripted import ScriptedRuntime

runtime = ScriptedRuntime([{reply!r}, " the end"])
runtime.model.name = "evil\x1b]52;c;Zm9v\x07 model"
sys.exit(run_chat(lambda: runtime))
"""
HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "8-bit clipboard": "\x9d52;c;cm0gLXJm\x9c",
    "title": "\x1b]0;pwned\x07",
    "title in code": "```\n\x1b]0;pwned\x1b\\\n```\n",
    "clear and reset": "\x1b[2J\x1b[3J\x1bc",
    "answerback": "\x05\x1b[6n\x1b[>q",
    "bell and shift": "\x07\x0e\x0f",
    "direction": "\u202epwned\u2066 &#x202e;",
}

FORBIDDEN = ("]52;", "cm0gLXJm", "Zm9v", "]0;pwned", "\x1b[3J", "\x1bc", "\x1b[6n", "\x05", "\x0e", "\u202e")


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_control_of_theirs_reaches_the_terminal(kind):
    """The words arrive; sequences that only the hostile text holds do not."""
    terminal = Terminal([sys.executable, "-c", PROGRAM.format(reply=HOSTILE[kind])])
    terminal.expect("learns from what you think")
    terminal.send("\x1b[200~hi \x9d0;pwned\x9c\u202e\x1b[201~\r")
    terminal.expect("the end")
    terminal.expect("Choose")
    terminal.send("\x11")
    assert terminal.wait() == 0
    raw = terminal.raw.decode(errors="replace")
    for sign in FORBIDDEN:
        assert sign not in raw
    assert not re.search("[\x80-\x9f\u2066]", raw)
