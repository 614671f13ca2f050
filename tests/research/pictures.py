"""This command writes the pictures of the chat for README.md and docs/ again. The starter model answers on
this machine, in an empty data folder.

    python -m tests.research.pictures                # all pictures; a minute
    python -m tests.research.pictures rated panel    # two pictures
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.compare_screen import CompareScreen
from ruvmlx.apps.chat.options import ChatOptions

from ruvmlx import settings
from ruvmlx.host.model_holder import Opener
from ruvmlx.memory.load_plan import Plan
from ruvmlx.progress import Watch
from ruvmlx.runtime import Runtime
from ruvmlx.sampling import Sampling

from ..chat.helpers import ask, until

FOLDER = Path(__file__).parents[2] / "apps" / "chat" / "screenshots"
DATA = "/home/ada/.local/share/ruvmlx"  # the data folder that the pictures show

Picture = Callable[
    [Any, Any], Awaitable[None]
]  # a function that brings the app into the state of the picture


async def first_run(app, pilot) -> None:
    """The screen of the first start."""


async def show_rating(app, pilot) -> None:
    """Two replies, the second one rated up and selected."""
    await _rate(app, pilot, "What is the capital of France?", "ctrl+y")
    await _rate(app, pilot, "Give me three short tips for a good night's sleep.", "ctrl+y")
    await pilot.press("tab")


async def panel(app, pilot) -> None:
    """Four ratings, and the side panel."""
    await _rate(app, pilot, "Give me three short tips for a good night's sleep.", "ctrl+y")
    await _rate(app, pilot, "What is the capital of France?", "tab", "5", "escape")
    await _rate(app, pilot, "Why is the sky blue?", "ctrl+y")
    await _rate(app, pilot, "How do I boil an egg?", "ctrl+n")
    await pilot.press("f2")


async def compare(app, pilot) -> None:
    """Two answers to one question, after ratings."""
    await _rate(app, pilot, "Why is the sky blue?", "ctrl+n")
    await _rate(app, pilot, "How do I boil an egg?", "ctrl+n")
    app.chat.prompt.text = "/compare Why is the sea salty?"
    await pilot.press("enter")
    await until(pilot, lambda: isinstance(app.screen, CompareScreen) and app.screen.offered)


# name of the file -> (picture, columns and lines of the terminal)
PICTURES: dict[str, tuple[Picture, tuple[int, int]]] = {
    "first_run": (first_run, (100, 30)),
    "rated": (show_rating, (92, 24)),
    "panel": (panel, (110, 40)),
    "compare": (compare, (110, 30)),
}


async def _rate(app, pilot, question: str, *keys: str) -> None:
    """Send a question, wait for the reply, press the keys that rate the reply, and wait for the effect."""
    reply = await ask(app, pilot, question)
    await pilot.press(*keys)
    await until(pilot, lambda: app.phase == "idle" and reply.rating)
    await pilot.pause(1)


async def write(name: str) -> None:
    """Write one picture."""
    bring, size = PICTURES[name]
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"RUVMLX_HOME": folder}):
        app = ChatApp(
            Opener(_open, None, "default", first_run=True),
            ChatOptions(sampling=Sampling(0), max_new_tokens=120, theme="dark", learn_when_idle=False),
        )
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.phase == "idle" or app.failure)
            await bring(app, pilot)
            await pilot.pause(2)
            text = app.export_screenshot(title="ruvmlx")
            app.host.close_now()
    (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")


def _open(model: str | None, adapter: str | None, watch: Watch) -> Runtime:
    chosen = settings.load({"model": model, "adapter": adapter})
    return Runtime.open(chosen, watch=watch)


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        with patch.object(Plan, "rows", _rows_of(Plan.rows)):
            asyncio.run(write(name))


def _rows_of(rows: Callable[[Plan], list[tuple[str, str]]]) -> Callable[[Plan], list[tuple[str, str]]]:
    """Return a method `Plan.rows` that shows the data folder DATA in place of this machine's folder."""
    return lambda plan: [(label, text.replace(str(plan.data), DATA)) for label, text in rows(plan)]


if __name__ == "__main__":
    main()
