"""Helpers of the chat's tests: wait for a condition, open the app, read the screen."""

import time
from contextlib import asynccontextmanager

from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.options import ChatOptions

SMALL, WIDE = (80, 24), (160, 50)


async def until(pilot, condition, seconds=60):
    """Wait until a condition holds, instead of sleeping for a fixed time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true:\n{screen_text(pilot.app)}"
        await pilot.pause(0.005)


@asynccontextmanager
async def chatting(runtime, size=SMALL, **options):
    """The app, opened and idle, and its pilot."""
    app = ChatApp(lambda: runtime, ChatOptions(**options))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.phase == "idle" or app.failure)
        assert not app.failure
        yield app, pilot
        app.host.close_now()


async def ask(app, pilot, text="Hello"):
    """Send a message and wait for its reply."""
    before = len(app.chat.transcript.replies)
    app.chat.prompt.text = text
    await pilot.press("enter")
    await until(pilot, lambda: len(app.chat.transcript.replies) == before + 1 and app.phase == "idle")
    return app.chat.transcript.replies[-1]


def lines_of(widget):
    """The characters that a widget and its children put on the screen."""
    return [line.text.rstrip() for line in widget.screen._compositor.render_strips()]


def screen_text(app):
    return "\n".join(lines_of(app.screen))
