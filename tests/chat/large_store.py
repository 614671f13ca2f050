"""How fast the chat is for a user with 400 chats and 15,000 replies.

    python -m tests.chat.large_store          makes such a store in a scratch folder, and measures

A report, no test: it prints each figure beside its limit. `cpu` is the processor time of the process, with
what it does in the background meanwhile; `wall` is by the clock, with what other programs take. Each is a
median, or for keys the 99th percentile. test_large_store.py runs all of it on a small store.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.chats_screen import ChatsScreen
from ruvmlx.apps.chat.messages import Notice
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.stream import wait_until_drawn
from textual.events import Key
from textual.widgets import Input

from ruvmlx import settings
from ruvmlx.runtime import Runtime
from ruvmlx.store import ReplyRow, Store

SCREEN, KEY, START = 150.0, 50.0, 1000.0  # ms: for any screen, for a key's echo (p99), and to the prompt
TIMES = 7  # of each screen
KEYS = 200
KEY_PAUSE = 0.05  # seconds between two keys
REST = 2.0  # seconds for work in the background
PAUSE = 0.002  # seconds between two looks at the app
TEXT = (
    "the train to Rome leaves at noon and we had bread cheese olives a long walk by the river where "
    "children played while old men read the paper about rain snow a new bridge some recipe for soup code"
)
WORDS = TEXT.split()


@dataclass(frozen=True)
class Size:
    chats: int
    replies: int
    rated: int


WHOLE = Size(400, 15_000, 300)


def fill(
    store: Store, size: Size, fingerprint: str, model: str, state: bytes | None, hidden: int = 8
) -> None:
    """Chats of very different lengths; the last one of all has half a percent of the replies, and a needle.

    state: of an adapter, which each rated reply makes a version of; None: no ratings. hidden: length of the
    vector of a question.
    """
    rng = random.Random(0)
    shares = [rng.paretovariate(1.2) for _ in range(size.chats - 1)]
    rest = size.replies - max(3, size.replies // 200)
    lengths = [max(1, round(rest * share / sum(shares))) for share in shares]
    lengths.append(max(3, size.replies - sum(lengths)))
    rated, version, number = size.rated, 0, 0
    for chat_number, length in enumerate(lengths):
        with store.transaction():
            chat = store.chats.new(model, title="" if chat_number % 3 else f"About {_text(rng, 3)}")
            if chat_number % 20 == 0:
                store.chats.set_folder(chat, f"Folder {chat_number // 100}")
            for n in range(length):
                number += 1
                needle = chat_number == len(lengths) - 1 and n == 1
                asked = _text(rng, 12) + (" needle" if needle else f" number {number}")
                store.messages.add_user(chat, asked)
                said = "\n\n".join(_text(rng, 40) for _ in range(rng.randint(1, 4)))
                store.replies.add(_reply(f"{number:012x}", fingerprint, model, asked, said, hidden), chat)
                if state is not None and rated and number % max(1, size.replies // size.rated) == 0:
                    version = store.versions.add(fingerprint, "default", version, state, 0.01, 0.5)
                    rating = str(rng.randint(1, 5))
                    store.ratings.add(fingerprint, "default", version, f"{number:012x}", rating, "", 1.0)
                    rated -= 1


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize() + "."


def _reply(reply_id: str, fingerprint: str, model: str, asked: str, said: str, hidden: int) -> ReplyRow:
    ids = list(range(100))
    query = np.random.default_rng(int(reply_id, 16)).standard_normal(hidden).astype(np.float32)
    return ReplyRow(reply_id, model, fingerprint, "default", 0, ids, ids, asked, said, "stop", query, -100.0)


@dataclass
class Figures:
    """Name -> [(ms of processor time, ms by the clock)]."""

    found: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    async def measure(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        await work()
        took = (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3
        self.found.setdefault(name, []).append(took)

    def lines(self) -> list[str]:
        said = [f"{'':34}{'cpu':>8}{'wall':>8}   limit, ms"]
        for name, took in self.found.items():
            cpu, wall = (statistics.median(column) for column in zip(*took, strict=True))
            limit = START if name.startswith("start") else SCREEN
            if name.startswith("key"):
                cpu, wall = (float(np.percentile(column, 99)) for column in zip(*took, strict=True))
                limit = KEY
            mark = "" if min(cpu, wall) <= limit else "  OVER"  # both hold what the other leaves out
            said.append(f"{name:34}{cpu:8.0f}{wall:8.0f}   {limit:.0f}{mark}")
        return said


class Driver:
    """Drives the app as its user would, and waits until the screen shows the result. Textual's pilot waits
    until the whole process rests, also for work in the background."""

    def __init__(self, app: ChatApp):
        self._app, self._opened, begin = app, 0, app.actions.library.begin

        async def begin_and_count(options: ChatOptions) -> None:
            await begin(options)
            self._opened += 1

        app.actions.library.begin = begin_and_count

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            if self._app.failure or time.monotonic() > deadline:
                raise TimeoutError(f"the app did not get there: {self._app.failure}")
            await asyncio.sleep(PAUSE)
        await wait_until_drawn(self._app.screen)

    async def key(self, key: str, is_done: Callable[[], object]) -> None:
        self._app.post_message(Key(key, key if len(key) == 1 else None))
        await self.until(is_done)

    async def letter(self, letter: str) -> None:
        length = len(self._app.chat.prompt.text)
        await self.key(letter, lambda: len(self._app.chat.prompt.text) > length)

    def _has_rows(self) -> bool:
        at = self._app.screen
        return isinstance(at, ChatsScreen) and at._found.is_set() and at.options.option_count > 0

    async def list_chats(self) -> None:
        await self.key("ctrl+o", self._has_rows)

    async def search(self, words: str) -> None:
        self._app.screen._found.clear()
        self._app.screen.query_one(Input).value = words
        await self.until(self._has_rows)

    async def open_highlighted(self) -> None:
        before = self._opened
        await self.key("enter", lambda: self._opened > before)

    async def _command(self, text: str, is_done: Callable[[], bool]) -> None:
        self._app.chat.prompt.text = text
        self._app.chat.prompt.focus()
        await wait_until_drawn(self._app.screen)
        await self.key("enter", is_done)

    async def return_to_end(self) -> None:
        """Give the input the focus after a search has opened a chat, so that the app shows the chat's end."""
        self._app.chat.prompt.focus()
        showing = self._app.actions.write._showing_end
        await self.until(lambda: not showing.locked() and not self._app.chat.transcript.has_found)

    async def open(self, chat: str) -> None:
        before = self._opened
        await self._command(f"/open {chat}", lambda: self._opened > before)

    async def find(self, words: str) -> None:
        before = len(self._app.query(Notice))
        await self._command(f"/find {words}", lambda: len(self._app.query(Notice)) > before)

    async def panel(self) -> None:
        self._app.chat.panel._shown = None
        await self.key("f2", lambda: self._app.chat.panel.display and self._app.chat.panel.view is not None)


async def measure(open_runtime: Callable[[], Runtime], times: int = TIMES, keys: int = KEYS) -> Figures:
    """Measure the real app over the store of this data folder."""
    figures, store = Figures(), Store(settings.store_file(), reading=True)
    chats = [chat.id for chat in store.chats.all()]
    longest = max(chats, key=lambda chat: store.chats.get(chat).turns)
    others = [chat for chat in chats if chat != longest]
    loaded: list[tuple[float, float]] = []

    def load() -> Runtime:
        begun = time.process_time(), time.perf_counter()
        runtime = open_runtime()
        loaded.append((time.process_time() - begun[0], time.perf_counter() - begun[1]))
        return runtime

    begun = time.process_time(), time.perf_counter()
    app = ChatApp(load, ChatOptions(learn_when_idle=False))
    async with app.run_test(size=(100, 30)):
        drive = Driver(app)
        await drive.until(lambda: app.phase == "idle")
        cpu, wall = time.process_time() - begun[0], time.perf_counter() - begun[1]
        figures.found["start, without the model's load"] = [
            ((cpu - loaded[0][0]) * 1e3, (wall - loaded[0][1]) * 1e3)
        ]
        await asyncio.sleep(REST)  # what begins with the app, such as proposals of models
        for n in range(times):
            await figures.measure("list of chats (Ctrl+O)", drive.list_chats)
            for words in ("a", "riv", "river", "needle"):
                await figures.measure(f"search: {words}", partial(drive.search, words))
            await figures.measure("open at the found message", drive.open_highlighted)
            await asyncio.sleep(REST)
            await figures.measure("back to the end of that chat", drive.return_to_end)
            await asyncio.sleep(REST)
            await figures.measure("open a chat", partial(drive.open, others[n % len(others)]))
            await asyncio.sleep(REST)
            await figures.measure("open the longest chat", partial(drive.open, longest))
            await asyncio.sleep(REST)
            await figures.measure("find in it", partial(drive.find, "river"))
            await figures.measure("side panel (F2)", drive.panel)
            await drive.key("f2", lambda: not app.chat.panel.display)
        app.chat.prompt.text = ""
        app.chat.prompt.focus()
        for n in range(keys):
            await asyncio.sleep(KEY_PAUSE)
            await figures.measure("key in the longest chat: p99", partial(drive.letter, "abcdefgh"[n % 8]))
        app.host.close_now()
    return figures


def main() -> None:
    """Make the store, measure, print."""
    with tempfile.TemporaryDirectory(prefix="ruvmlx-large-") as home:
        os.environ["RUVMLX_HOME"] = home
        from ruvmlx.engine.types import GenerationRequest

        with Runtime.open(settings.Settings()) as runtime:
            for _ in runtime.writer.generate(GenerationRequest(prompt="Hello", max_new_tokens=8)):
                pass
            runtime.rate("last", "up")
            fingerprint, name = runtime.model.fingerprint, runtime.model.name
            state = runtime.store.versions.get(fingerprint, "default", 1).state
            runtime.undo()
        began = time.monotonic()
        store = Store(settings.store_file())
        fill(store, WHOLE, fingerprint, name, state)
        size = Path(settings.store_file()).stat().st_size
        print(f"{WHOLE.chats} chats, {WHOLE.replies:,} replies: {size / 1e6:.0f} MB, made in "
              f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
        figures = asyncio.run(measure(lambda: Runtime.open(settings.Settings())))
        print("\n".join(figures.lines()))


if __name__ == "__main__":
    sys.exit(main())
