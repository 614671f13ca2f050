"""The main screens of the app, character by character, in a small and a wide terminal.

After an intended change, run `pytest tests/chat/test_screens.py --write-screens` and read the diff.
"""

from pathlib import Path

import pytest

from ruvmlx.chats.learning import LearningState, Rated
from ruvmlx.platform import memory
from ruvmlx.platform.sensors import SensorReading, Sensors
from ruvmlx.sona.rating_index import MemoryStatus
from ruvmlx.store import SessionRow

from .helpers import SMALL, WIDE, ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime

SCREENS = Path(__file__).parent / "screens"
REPLY = """## Sorting

Use `sorted`, which leaves the *old* list alone:

```python
def newest(rows):
    return sorted(rows, key=lambda row: row.time)
```

1. It is **stable**.
2. It takes any iterable:
   - a tuple
   - a [generator](https://docs.python.org)

| call | result |
|---|---|
| `sorted([3, 1])` | `[1, 3]` |

> 日本語 and emoji 👩‍👩‍👧 fit, too.
"""


class Shelf:
    """Three old chats."""

    def all(self):
        titles = ("Sorting rows by time", "Was kostet die Welt?", "日本語のテキスト " * 9)
        return [SessionRow(f"s{n}", title, None, "m", n + 2, 0.0) for n, title in enumerate(titles)]

    def deletion_times(self):
        return {}


class LearnedRuntime(ScriptedRuntime):
    """A scripted runtime that has learned something."""

    def __init__(self, *replies):
        super().__init__(*replies)
        self.store.chats = Shelf()

    def state(self):
        recent = [
            Rated("r2", "up", "just right", "Sort it"),
            Rated("r1", "2", "", "And 漢字 of a long question?"),
        ]
        return LearningState("default", self.status(), MemoryStatus(2, 1, 0, 3, 0, 0), 14, recent)


async def welcome(app, pilot):
    """The app after its start."""


async def reply(app, pilot):
    await ask(app, pilot, "How do I sort rows?\nBy time.")


async def rated(app, pilot):
    await reply(app, pilot)
    await pilot.press("ctrl+y")
    await until(pilot, lambda: app.chat.transcript.replies[-1].effect)


async def chosen(app, pilot):
    """A reply has the focus; the bottom line shows its keys."""
    await reply(app, pilot)
    await pilot.press("tab")


async def editing(app, pilot):
    await reply(app, pilot)
    await pilot.press("tab", "e")
    await until(pilot, lambda: app.chat.editing)


async def error(app, pilot):
    app.chat.prompt.text = "/rate 9"
    await pilot.press("enter")
    await until(pilot, lambda: "got '9'" in screen_text(app))


async def side_panel(app, pilot):
    await rated(app, pilot)
    await pilot.press("f2")
    await until(pilot, lambda: "Recent ratings" in screen_text(app))


async def chats(app, pilot):
    await pilot.press("ctrl+o")
    await until(pilot, lambda: "Was kostet" in screen_text(app))


async def helping(app, pilot):
    await pilot.press("f1")
    await until(pilot, lambda: "Ctrl+Y, Ctrl+N, Ctrl+R" in screen_text(app))


@pytest.fixture
def stored_screen(request):
    """The stored screen of that name, or None with --write-screens."""
    writes = request.config.getoption("--write-screens")

    def look(name, shown):
        if writes:
            SCREENS.mkdir(exist_ok=True)
            (SCREENS / f"{name}.txt").write_text(shown, encoding="utf-8")
        return (SCREENS / f"{name}.txt").read_text(encoding="utf-8")

    return look


@pytest.mark.parametrize("size", [SMALL, WIDE], ids=["80x24", "160x50"])
@pytest.mark.parametrize(
    "screen",
    [welcome, reply, rated, chosen, editing, error, side_panel, chats, helping],
    ids=lambda f: f.__name__,
)
async def test_screen(screen, size, stored_screen, monkeypatch):
    monkeypatch.setattr(memory, "resident", lambda: 400 << 20)
    monkeypatch.setattr(memory, "peak", lambda: 500 << 20)
    monkeypatch.setattr(Sensors, "read", lambda _: SensorReading())
    async with chatting(LearnedRuntime([REPLY]), size) as (app, pilot):
        await screen(app, pilot)
        app.chat.prompt.cursor_blink = False
        app.chat.status.message = ""  # it is there for a moment only
        await until(pilot, lambda: not app._batch_count)
        await pilot.pause()
        shown = "\n".join(lines_of(app.screen)) + "\n"
        assert shown == stored_screen(f"{screen.__name__}-{size[0]}x{size[1]}", shown)
