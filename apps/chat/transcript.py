"""This module is the widget of the conversation. The widget scrolls when new text arrives, and it loads
earlier messages when the user scrolls to the top."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from textual.containers import VerticalScroll
from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.scrollbar import ScrollBar
from textual.widget import Widget

from ruvmlx.chats.conversations import ALL_READ, ChatRoom
from ruvmlx.runtime import Turn

from . import messages, windowed
from .earlier_feedback import earlier_feedback
from .markdown import ReplyMarkdown, wait_for_texts
from .messages import ChatMessage, Notice, ReplyMessage, UserMessage, message_of
from .steps.write import is_shown
from .stream import wait_until_drawn
from .view_model import Standing
from .welcome import Welcome

# The messages of an opened chat fill SCREENS screens. A message takes 10 to 20 ms to show, so the number of
# messages is at most MAX_SHOWN_MESSAGES.
MAX_SHOWN_MESSAGES, SCREENS = 16, 1.3
EARLIER = 10  # the number of earlier messages that are loaded when the user scrolls to the top
FRAME_ROWS, FRAME_COLUMNS = 2, 6  # rows and columns around the text of a message
MAX_COLUMNS = 1 << 16  # a number of columns that no terminal has


@dataclass
class ScrollHold:
    """A widget that must keep its place on the screen while other widgets are added above it."""

    widget: Widget
    y: int  # the number of the widget's line in the conversation when the hold began
    scroll_y: float
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def moved_by(self, arranged: DockArrangeResult) -> int:
        """Return the number of lines by which a new arrangement moves the held widget down. If the widget is
        gone, no later arrangement moves it."""
        places = (p.region.y for p in arranged.placements if p.widget is self.widget)
        distance = next(places, self.y) - self.y
        if distance or not self.widget.is_attached:
            self.moved.set()
        return distance


class Transcript(VerticalScroll, can_focus=False):
    """The widget of the conversation. The widget scrolls with a growing reply until the user scrolls up. When
    the user is back at the end, the widget scrolls with the reply again.

    For a long chat, the widget loads only the newest messages. When the user scrolls to the top, it loads
    some earlier messages.
    """

    def __init__(self, before_add: Callable[[], None]) -> None:
        """before_add: a function that `add` calls first."""
        super().__init__()
        self._before_add = before_add
        self._earlier: list[Turn] = []  # messages before the shown messages; they have no widgets yet
        self._later: list[Turn] = []  # messages after the shown messages, as after a search
        self._lacks_earlier = False  # True: `_earlier` can lack the older messages of the chat
        self._top: Widget | None = None  # the message that the next layout puts at the top of the screen
        self._notice: Notice | None = None  # a new notice, until the next layout
        self._found: int | None = None  # the id of the message that a search found
        self._ratings: Mapping[str, str | None] = {}  # newer ratings of the replies that have no widgets yet
        self._feedback: Mapping[str, str] = {}  # reply id -> its reason or preference, in words
        self._room: ChatRoom = ALL_READ  # the messages that the model no longer reads
        self._loading = asyncio.Lock()
        self._held: ScrollHold | None = None

    def on_mount(self) -> None:
        self.anchor()

    async def add(self, *widgets: Widget) -> None:
        """Add widgets at the end of the conversation, and scroll to them. Keep the end on the screen while
        the widgets grow."""
        self._before_add()
        await self.query_children(Welcome).remove()
        await self.mount_all(widgets)
        self.anchor()
        self._notice = next((widget for widget in widgets[:1] if isinstance(widget, Notice)), None)
        self.refresh(layout=self._notice is not None)

    def _show_beginning(self, arranged: DockArrangeResult, height: int) -> None:
        """Put the first line of a new notice at the top of the screen if the screen is lower than the notice.
        The user reads a long notice, such as the help, from its beginning. The layout calls this method,
        because a notice has no height before the layout."""
        notice = self._notice

        def end_beginning() -> None:  # later layouts do not scroll to the notice
            if notice and self._notice is notice:
                self._notice = None
                if notice.is_attached and notice.outer_size.height > self.size.height:
                    self.scroll_to_widget(notice, top=True, animate=False, force=True)

        for place in arranged.placements if notice else ():
            if place.widget is notice and place.region.height > height:
                self.release_anchor()
                self._put_scroll(place.region.y)
            if place.widget is notice and place.region.height:
                self.call_after_refresh(end_beginning)

    async def restart(
        self, turns: list[Turn], model: str, at: int | None = None, are_newest: bool = False
    ) -> None:
        """Remove all widgets. Then show some of the messages `turns`: the last messages, or the messages from
        a few before the message `at`. The shown messages fill about SCREENS screens, but are at most
        MAX_SHOWN_MESSAGES.

        model: the name of the model
        at: the id of a message; None: show the last messages
        are_newest: True: `turns` has only the newest messages of the chat; `show_standing` gets all
        """
        spoken = [turn for turn in turns if is_shown(turn)]
        places = [n for n, turn in enumerate(spoken) if turn.id == at and at is not None]
        rows, columns = SCREENS * self.app.size.height, max(1, self.app.size.width - FRAME_COLUMNS)
        first = places[0] if places else len(spoken)
        after, filled = _count_to_fill(spoken[first:], rows, columns)
        before, _ = _count_to_fill(spoken[:first][::-1], max(rows / 4, rows - filled), columns)
        end = first + after
        begin = max(first - before, end - MAX_SHOWN_MESSAGES)
        # while the old widgets go, a load of other messages must find none
        self._earlier, self._later, self._lacks_earlier = [], [], False
        with self.app.batch_update():
            await self.remove_children()
            self._earlier, self._later, self._found = spoken[:begin], spoken[end:], at if places else None
            self._ratings, self._feedback, self._lacks_earlier = {}, {}, are_newest
            await self.mount_all(map(message_of, spoken[begin:end]) if spoken else [Welcome(model)])
            await wait_for_texts(self.query(ReplyMarkdown))
        self.anchor(not places)

    def select_found(self) -> bool:
        """Mark the message that the search found, scroll to it, and give the focus to the nearest reply, if
        possible from this message on. Return False if no message was found. When the input has the focus
        again, the app shows the end of the chat."""
        messages = self.messages
        at = next((n for n, m in enumerate(messages) if m.message_id == self._found), None)
        if self._found is None or at is None:
            return False
        found = self._top = messages[at]
        found.add_class("found")
        near = [*messages[at:], *reversed(messages[:at])]
        reply = next((message for message in near if isinstance(message, ReplyMessage)), None)
        if reply:
            reply.focus(scroll_visible=False)

        def scroll() -> None:
            self._top = None
            if found.is_attached:
                self.scroll_to_widget(found, top=True, animate=False, force=True)

        self.call_after_refresh(scroll)
        return True

    def follow_end(self) -> None:
        """Scroll to the end of the chat after `select_found`. From now on, scroll down again when new text
        arrives."""
        if self._found is not None:
            self._found = None
            self.anchor()

    @property
    def has_found(self) -> bool:
        return self._found is not None

    @property
    def has_later(self) -> bool:
        return bool(self._later)

    async def show(self, turns: list[Turn], model: str) -> None:
        """Show the messages `turns`. Keep the widgets of the messages before the first message that is no
        longer in `turns`. If too many messages follow these widgets, make all widgets again (`restart`)."""
        spoken = [turn for turn in turns if is_shown(turn)]
        place = {turn.id: n for n, turn in enumerate(spoken)}
        kept = [w for w in itertools.takewhile(lambda w: w.message_id in place, self.messages)]
        after = place[kept[-1].message_id] + 1 if kept else 0
        if not kept or len(spoken) - after > MAX_SHOWN_MESSAGES:
            await self.restart(turns, model)
            return
        with self.app.batch_update():
            await self.cut(kept[-1])
            await self.mount_all(map(message_of, spoken[after:]))
        for widget in kept:
            widget.place(spoken[place[widget.message_id]])
        self._later = []
        self.anchor()

    async def trim(self, turns: list[Turn]) -> None:
        """Remove the widgets of the oldest messages of a growing chat. The widgets of these messages are
        loaded again when the user scrolls to the top. While the user is not at the end of the chat, remove
        nothing.

        turns: the messages of the whole chat.
        """
        shown = self.messages
        if (
            len(shown) <= MAX_SHOWN_MESSAGES + EARLIER
            or self._loading.locked()
            or not self.is_vertical_scroll_end
        ):
            return
        spoken = [turn for turn in turns if is_shown(turn)]
        place = {turn.id: n for n, turn in enumerate(spoken) if turn.id is not None}
        first = next((w for w in shown[-MAX_SHOWN_MESSAGES:] if w.message_id in place), None)
        children = list(self.children)
        gone = children[: children.index(first)] if first else []
        if first and first.message_id is not None and not any(widget.has_focus_within for widget in gone):
            self._earlier = spoken[: place[first.message_id]]
            await self.remove_children(gone)

    async def cut(self, after: Widget) -> None:
        """Remove all widgets below the widget `after`."""
        self._later = []
        children = list(self.children)
        await self.remove_children(children[children.index(after) + 1 :])

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value <= 0 < old_value:
            self.run_worker(self.load_earlier())
        elif self._later and old_value < new_value >= self.max_scroll_y:
            self.run_worker(self.load_later())

    @property
    def has_earlier(self) -> bool:
        return bool(self._earlier)

    async def load_earlier(self) -> None:
        """Add some earlier messages at the top of the conversation. The messages on the screen keep their
        places.

        Do not call this method in a message handler of Textual, because it waits until Textual has laid out
        the messages. If two callers call the method at the same time, the messages are loaded once.
        """
        already = self._loading.locked()
        async with self._loading:
            if self._earlier and not already:
                await self._load()

    async def load_later(self) -> None:
        """Add some later messages at the end of the conversation. The messages on the screen keep their
        places."""
        async with self._loading:
            self._later, turns = self._later[EARLIER:], self._later[:EARLIER]
            await self.mount_all(map(self._rated_widget, turns))
            self._mark_left_out()

    async def _load(self) -> None:
        await wait_until_drawn(self)
        await self.stop_animation("scroll_y", complete=False)  # the animation's target position will move
        if not self._earlier:  # another chat has been opened meanwhile
            return
        self._earlier, turns = self._earlier[:-EARLIER], self._earlier[-EARLIER:]
        first, has_room = self.children[0], self.max_scroll_y <= 0
        self._held = ScrollHold(first, first.virtual_region.y, self.scroll_y)
        try:
            with self.app.batch_update():
                await self.mount_all(map(self._rated_widget, turns), before=first)
                self._mark_left_out()
            if not has_room:  # on a screen that is not full, messages above `first` need not move it
                await self._held.moved.wait()
            await wait_until_drawn(self)
        finally:
            self._held = None

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Lay out the messages. While earlier messages are added at the top, keep the held widget on its line
        of the screen.

        The method changes the scroll position during the layout. If the scroll position changed after the
        layout, one frame would show the messages in a wrong place.
        """
        arranged = super().arrange(size, optimal)
        if self._held:
            moved = self._held.moved_by(arranged)
            if moved:
                self._put_scroll(self._held.scroll_y + moved)
        top = [place.region.y for place in arranged.placements if place.widget is self._top]
        if top:
            self._put_scroll(max(0, min(top[0], arranged.total_region.height - size.height)))
        self._show_beginning(arranged, size.height)
        windowed.tell(arranged, self._window(arranged, size.height))
        is_short = self.children and arranged.total_region.height <= size.height
        if self._earlier and is_short and not self._loading.locked():
            self.call_after_refresh(self._fill_screen)
        return arranged

    def _fill_screen(self) -> None:
        """Load earlier messages if the shown messages do not fill the screen, because the user cannot scroll
        up then."""
        self.run_worker(self._load_until_full())

    async def _load_until_full(self) -> None:
        while self._earlier and self.max_scroll_y <= 0:
            await self.load_earlier()

    def _window(self, arranged: DockArrangeResult, height: int) -> Region:
        """Return the region of the conversation that must be placed: the part on the screen, one screen above
        it, and one screen below it."""
        follows = self._anchored and not self._anchor_released
        top = arranged.total_region.bottom - height if follows else self.scroll_y
        return Region(0, int(top) - height, MAX_COLUMNS, 3 * height)

    def _put_scroll(self, y: float) -> None:
        self.set_reactive(Widget.scroll_y, y)
        self.set_reactive(Widget.scroll_target_y, y)
        self.vertical_scrollbar.set_reactive(ScrollBar.position, y)

    def show_standing(self, standing: Standing) -> None:
        """Show the ratings of `standing` on all shown replies, and keep the ratings of all other replies."""
        ratings = self._ratings = standing.ratings
        self._feedback = earlier_feedback(standing)
        for reply in self.replies:
            if (id_ := reply.reply_id) in ratings:
                reply.restore_rating(ratings[id_], standing.version, self._feedback.get(id_, ""))
                reply.show_newest(id_ == standing.newest)
        self._room = standing.room
        self._mark_left_out()
        if self._lacks_earlier and (earlier := _turns_before(self.messages, standing.turns)) is not None:
            self._lacks_earlier, self._earlier = False, earlier
            if self.scroll_y <= 0 < self.max_scroll_y:
                self.run_worker(self.load_earlier())

    def _rated_widget(self, turn: Turn) -> ChatMessage:
        """Return the widget of a message, with the newest rating that `show_standing` has received."""
        reply_id, widget = turn.reply_id or "", message_of(turn)
        if isinstance(widget, ReplyMessage):
            rating, words = self._ratings.get(reply_id, turn.rating), self._feedback.get(reply_id, "")
            widget.restore_rating(rating, 0, words)
        return widget

    def _mark_left_out(self) -> None:
        """Dim the messages that the model no longer reads, and draw a line above the first message that the
        model reads."""
        before = False
        title = messages.READ_NOTES_AND_REST if self._room.summed_up else messages.READ_FROM_HERE
        for message in self.messages:
            is_out = message.message_id in self._room.left_out
            message.border_title = title
            message.set_class(is_out, "left-out")
            message.set_class(before and not is_out, "read-from-here")
            before = is_out

    @property
    def messages(self) -> list[ChatMessage]:
        """The widgets of the messages that the conversation shows."""
        return [child for child in self.children if isinstance(child, ChatMessage)]

    def begin_of_answer(self, reply: ReplyMessage) -> ChatMessage:
        """Return the first message after the question of a reply: the reply itself, or the first tool call or
        reply between the question and this reply."""
        before = list(itertools.takewhile(lambda w: w is not reply, self.messages))
        after = itertools.takewhile(lambda w: not isinstance(w, UserMessage), reversed(before))
        found: list[ChatMessage] = [reply, *after]
        return found[-1]

    def question_of(self, reply: ReplyMessage) -> UserMessage | None:
        """Return the user's message that a reply answers, or None."""
        before = itertools.takewhile(lambda w: w is not reply, self.messages)
        return next((w for w in reversed(list(before)) if isinstance(w, UserMessage)), None)

    @property
    def replies(self) -> list[ReplyMessage]:
        """The shown replies that the user can rate, the oldest first."""
        return [m for m in self.messages if isinstance(m, ReplyMessage) and m.finished and m.reply_id]

    def neighbour(self, of: ReplyMessage, step: int) -> ReplyMessage:
        replies = self.replies
        place = replies.index(of) + step if of in replies else len(replies) - 1
        return replies[max(0, min(place, len(replies) - 1))]


def _turns_before(messages: Sequence[ChatMessage], turns: Sequence[Turn]) -> list[Turn] | None:
    """Return the turns that come before the first shown message. Return None if the turns belong to another
    chat, and so do not have this message."""
    spoken = [turn for turn in turns if is_shown(turn)]
    ids = [turn.id for turn in spoken]
    first = messages[0].message_id if messages else None
    return spoken[: ids.index(first)] if first is not None and first in ids else None


def _count_to_fill(turns: list[Turn], rows: float, columns: int) -> tuple[int, float]:
    """Return (how many of the turns, from the first one on, fill this number of rows; the rows that they
    fill). The number of turns is at most MAX_SHOWN_MESSAGES. Each line of a text is counted as plain text,
    because Markdown takes about as many rows."""
    filled = 0
    for count, turn in enumerate(turns[:MAX_SHOWN_MESSAGES]):
        if filled >= rows:
            return count, filled
        filled += FRAME_ROWS + sum(1 + len(line) // columns for line in turn.content.splitlines())
    return min(len(turns), MAX_SHOWN_MESSAGES), filled
