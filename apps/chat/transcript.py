"""The conversation: it follows what is new, and fetches what is old when the reader goes there."""

import asyncio
from dataclasses import replace

from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget

from ruvmlx.runtime import Turn

from .messages import Reply, UserMessage, Welcome
from .opened import Standing

PAGE = 60  # messages that are shown at once: each costs about 10 ms


class Transcript(VerticalScroll, can_focus=False):
    """It follows a growing reply until the user scrolls up, and again from the end on.

    Of a long chat the newest messages are there; scrolling to the top brings earlier ones, a page at a time.
    """

    def __init__(self, *children: Widget) -> None:
        super().__init__(*children)
        self._earlier: list[Turn] = []  # not shown yet
        self._loading = asyncio.Lock()

    def on_mount(self) -> None:
        self.anchor()

    async def add(self, *widgets: Widget) -> None:
        """What the user asked for is always in view; what grows then is followed from there."""
        await self.query(Welcome).remove()
        await self.mount_all(widgets)
        self.anchor()

    async def restart(self, turns: list[Turn], model: str) -> None:
        """Show these turns and nothing else."""
        spoken = [turn for turn in turns if turn.role != "system"]
        self._earlier = spoken[:-PAGE]
        with self.app.batch_update():
            await self.remove_children()
            await self.mount_all(map(_widget, spoken[-PAGE:]) if spoken else [Welcome(model)])
        self.anchor()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value <= 0 < old_value:
            self.run_worker(self.load_earlier())

    async def load_earlier(self) -> None:
        """Put earlier messages above the first one; what is on the screen stays where it is."""
        async with self._loading:
            if not self._earlier:
                return
            self._earlier, turns = self._earlier[:-PAGE], self._earlier[-PAGE:]
            first = self.children[0]
            down = self.scroll_y - first.virtual_region.y
            with self.app.batch_update():
                await self.mount_all(map(_widget, turns), before=first)
                await self._laid_out()
                self.scroll_to(y=first.virtual_region.y + down, animate=False, immediate=True)

    async def _laid_out(self) -> None:
        done = asyncio.Event()
        self.call_after_refresh(done.set)
        await done.wait()

    def show_standing(self, standing: Standing) -> None:
        """Every reply's rating as it is now, those not shown yet included."""
        ratings = standing.ratings
        for reply in self.replies:
            if reply.reply_id in ratings:
                reply.restore_rating(ratings[reply.reply_id], standing.version)
        self._earlier = [replace(t, rating=ratings.get(t.reply_id or "")) for t in self._earlier]

    @property
    def replies(self) -> list[Reply]:
        """Those that are shown and can be rated, oldest first."""
        return [reply for reply in self.query(Reply) if reply.finished and reply.reply_id]

    async def neighbour(self, of: Reply, step: int) -> Reply:
        if step < 0 and self.replies[:1] == [of]:
            await self.load_earlier()
        replies = self.replies
        place = replies.index(of) + step if of in replies else len(replies) - 1
        return replies[max(0, min(place, len(replies) - 1))]


def _widget(turn: Turn) -> Vertical:
    return UserMessage(turn.content) if turn.role == "user" else Reply.of_turn(turn)
