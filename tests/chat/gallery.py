"""Shows hostile texts in every widget of the chat app, or in plain mode: `python -m tests.chat.gallery ...`.

Run on a pseudo-terminal by test_terminal_safety. Each text is shown in all places: as a streamed reply, an
earlier chat's messages, its title, a model's name, a note, an error message. A tag before it names the place
and the text: "reply00007".
"""

import asyncio
import io
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from ruvmlx.apps.chat import app, describe, stream
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.chats_screen import ChatsScreen
from ruvmlx.apps.chat.commands import Command
from ruvmlx.apps.chat.messages import Notice, ReplyMessage, UserMessage
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.overview import Overview
from ruvmlx.apps.chat.plain import PlainChat
from textual.events import Paste

from ruvmlx.chats.learning import LearningState, Rated
from ruvmlx.engine.types import Chunk
from ruvmlx.errors import NotFound, UsageError, error_line
from ruvmlx.runtime import Turn
from ruvmlx.sona.rating_index import MemoryStatus
from ruvmlx.store import NamedRow, SessionRow

from .hostile import hostile
from .scripted import ScriptedRuntime

PLACES = ("reply", "turn", "name", "notice", "error", "panel", "title", "paste", "adapter", "system", "flash")
LISTED = 10  # titles in the list of chats


def tagged_text(place: str, n: int) -> str:
    """Text number n with its tag for this place."""
    assert place in PLACES
    return f"{place}{n:05d} {hostile(n, random.Random(n))}"


class Chats:
    """A store of chats whose titles and messages are hostile; the newest chat is "s"."""

    def __init__(self) -> None:
        self.titles = [""]

    def get(self, _: str = "s", at: int = 0) -> SessionRow:
        return SessionRow("s" if not at else f"s{at}", self.titles[at], None, "m", 2, time.time())

    def deletion_times(self) -> dict[str, float]:
        return {}

    def all(self) -> list[SessionRow]:
        return [self.get(at=at) for at in range(len(self.titles))]

    def find(self, words: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(session=s, message_id=1, role="user", content=s.title) for s in self.all()]

    def set_title(self, session: str, title: str) -> None:
        self.titles[0] = title


class HostileRuntime(ScriptedRuntime):
    """A runtime in which every name, note and title is the hostile text."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.panel = "", ""
        chats = Chats()
        vars(self.store).update(chats=chats, search=chats)

    def show(self, n: int) -> None:
        self.text, self.panel = hostile(n, random.Random(n)), tagged_text("panel", n)
        self.model.name, self.adapter = tagged_text("name", n), tagged_text("adapter", n)
        self.store.chats.titles = [self.text, *self.store.chats.titles][:LISTED]
        turns = [Turn("system", self.text), Turn("user", f"{tagged_text('turn', n)}\n\nturn{n:05d}")]
        seen = self.text[:500]  # a longer one would push the turn's end out of sight
        self.spoken["s"] = [*turns, Turn("assistant", seen, "r1", "4", "length", 3, 1, 2)]

    def state(self) -> LearningState:
        rated = [Rated("r", "up", self.text, self.text), Rated("r", "2", "", self.text)]
        return LearningState(self.panel, self.status(), MemoryStatus(1, 1, 0, 1, 0, 0), 3, rated)

    def adapters(self) -> list[NamedRow]:
        return [NamedRow(self.text, "f", "m", 3, 1000)]


class Gallery(ChatApp):
    """The app; it shows the texts by itself and then quits."""

    CSS_PATH = Path(app.__file__).with_name("app.tcss")

    def __init__(self, runtime: HostileRuntime, numbers: range):
        super().__init__(lambda: runtime, ChatOptions(learn_when_idle=False))
        self.scripted, self.numbers, self.shows = runtime, numbers, False

    def watch_phase(self) -> None:
        super().watch_phase()
        if self.phase == "idle" and not self.shows:
            self.shows = True
            self.run_worker(self._show_all())

    async def _show_all(self) -> None:
        self.chat.panel.display = True
        for n in self.numbers:
            await self._show(n)
        self.action_leave()

    async def _show(self, n: int) -> None:
        """Show each text in all places, one frame for each place; the list of chats shows all titles at
        once."""
        self.scripted.show(n)
        text = self.scripted.text
        await self.actions.library.begin(replace(self.options, session="s"))
        await self._wait_for_frame()
        await self._in_the_conversation(n)
        self.chat.panel.show(Overview.of(self.scripted), None)
        self.chat.status.flash(error_line(NotFound(tagged_text("flash", n))))
        self.chat.prompt.text = ""
        self.chat.prompt.post_message(Paste(tagged_text("paste", n)))
        await self._wait_for_frame()
        await self.actions.obey(Command("title", tagged_text("title", n)))
        self.chat.status.background = describe.lesson({"promoted": True, "reason": text})
        self.chat.prompt.begin_edit(UserMessage(text).text)
        await self._wait_for_frame()
        self.chat.prompt.end_edit()
        self.chat.status.background = ""
        if n % LISTED == LISTED - 1:
            await self._in_the_list()

    async def _in_the_conversation(self, n: int) -> None:
        await self.actions.obey(Command("adapter"))
        await self._wait_for_frame()
        await self.actions.obey(Command("status"))
        await self.actions.obey(Command("system", tagged_text("system", n)))
        await self._wait_for_frame()
        reply = ReplyMessage()
        await self.chat.transcript.add(Notice(tagged_text("notice", n)), reply)
        await self._wait_for_frame()
        await self.chat.show_error(UsageError(tagged_text("error", n)))
        await stream.show_reply(reply, chunks(tagged_text("reply", n)), self.chat.status)
        await reply.finish(tagged_text("reply", n), "cancelled")

    async def _in_the_list(self) -> None:
        screen = ChatsScreen(self.chat, "words")
        await self.push_screen(screen)
        for worker in [w for w in self.workers if w.node is screen]:
            await worker.wait()
        await self._wait_for_frame()
        screen.action_rename()
        await self._wait_for_frame()
        await self.pop_screen()

    async def _wait_for_frame(self) -> None:
        drawn = asyncio.Event()
        self.screen.call_after_refresh(drawn.set)
        await drawn.wait()


def cut(text: str) -> list[str]:
    """A reply in pieces, as it streams: some hundred at most."""
    step = max(7, len(text) // 100)
    return [text[start : start + step] for start in range(0, len(text), step)]


async def chunks(text: str) -> AsyncIterator[list[Chunk]]:
    """The same pieces as chunks, for a screen that draws only now and then."""
    parts = cut(text)
    for n in range(0, len(parts), at_once := len(parts) // 2 + 1):
        yield [Chunk("".join(parts[n : n + at_once]), generated=n + 1)]


def show_plain(runtime: HostileRuntime, numbers: range) -> int:
    """The same in plain mode: every command that prints somebody's text."""
    for n in numbers:
        runtime.show(n)
        runtime.replies = [cut(tagged_text("reply", n)), UsageError(tagged_text("error", n))]
        lines = [
            "hi",
            "hi",
            f"/title {tagged_text('title', n)}",
            "/chats",
            "/chats words",
            "/open 1",
            "/learning",
        ]
        lines += ["/status", "/adapter", "/system"]
        options = ChatOptions(session="s", system=tagged_text("system", n), replaces_system=True)
        PlainChat(runtime, options, io.StringIO("\n".join(lines)), sys.stdout).run()
    return 0


def main(mode: str, first: str, last: str) -> int:
    runtime, numbers = HostileRuntime(), range(int(first), int(last))
    if mode == "plain":
        return show_plain(runtime, numbers)
    stream.FRAME = 0
    gallery = Gallery(runtime, numbers)
    gallery.run()
    if gallery.failure:
        print(f"failed: {error_line(gallery.failure)}", file=sys.stderr)
    return int(bool(gallery.failure))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
