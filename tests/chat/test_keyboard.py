"""The keys of a terminal, as the app gets them."""

import asyncio
import sys
import termios
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ruvmlx.apps.chat.keyboard import Keyboard
from textual.events import Key, Paste

from .terminal import Terminal

# an app that starts once its terminal has a whole line, and prints the first seven keys
LATE_APP = """
import select, sys
from ruvmlx.apps.chat.keyboard import TerminalDriver
from textual.app import App

class Keys(App):
    got = []
    def on_key(self, event):
        self.got.append(event.key)
        if len(self.got) == 7:
            self.exit()

print("starting", flush=True)
select.select([sys.stdin], [], [])
Keys(driver_class=TerminalDriver).run()
print("keys:", *Keys.got)
"""

COLOURED = "first \x1b[31mred\x1b[0m bell\x07 delete\x18 last\nnext"


def messages_of(*pieces: str) -> list[Any]:
    """What the app gets if these bytes arrive one piece after the other."""

    async def type_all():
        app: Any = SimpleNamespace(is_running=False, message_queue_size=0)
        got: list[Any] = []
        keyboard = Keyboard(app, got.append)
        for piece in pieces:
            keyboard.feed(piece.encode())
            await asyncio.sleep(0)
        while keyboard.unread:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        return got

    return asyncio.run(type_all())


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_escape_sequences_and_control_characters_of_a_paste_are_no_keys(size):
    """Else a paste of coloured text arrived out of order, and its control characters pressed keys."""
    data = f"\x1b[200~{COLOURED}\x1b[201~x"
    got = messages_of(*(data[i : i + size] for i in range(0, len(data), size)))
    assert [type(message) for message in got] == [Paste, Key]
    assert got[0].text == "first red bell delete last\nnext" and got[1].key == "x"


def test_keys_outside_a_paste_are_all_keys():
    got = messages_of("a\x18\x1b[A", "\x1b[200~b\x1b[", "201~", "\x1b[31~")
    assert [m.text if isinstance(m, Paste) else m.key for m in got][:4] == ["a", "ctrl+x", "up", "b"]


def test_an_enter_that_was_typed_before_the_app_started_is_an_enter():
    """Else a message that was typed while Python started got a new line, and was not sent."""
    terminal = Terminal([sys.executable, "-c", LATE_APP])
    terminal.expect("starting")
    terminal.send("hi\r")
    while terminal.attributes[3] & termios.ICANON:  # until the app has started
        time.sleep(0.01)
    terminal.send("a\n\rb")
    terminal.expect("keys: h i enter a ctrl\\+j enter b", 60)
    assert terminal.wait() == 0
