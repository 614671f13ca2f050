"""This module has the two lines below the input. The status line shows figures of the newest reply and of
learning. The second line shows the keys that work now."""

import time
from dataclasses import dataclass, replace

from rich.cells import cell_len
from textual.binding import ActiveBinding
from textual.content import Content
from textual.events import Click
from textual.reactive import reactive
from textual.timer import Timer
from textual.widgets import Static

from ruvmlx.chats.conversations import ALL_READ, ChatRoom
from ruvmlx.engine.types import Chunk
from ruvmlx.runtime import LearnStatus

from . import keys
from .describe import NEARLY_FULL, ratings_text, seconds
from .messages import ReplyMessage

GAP = "  ·  "
READING_SPEED = 12  # characters a second of a slow reader


@dataclass(frozen=True)
class Meter:
    """Figures of the newest reply, which the app updates while the reply streams."""

    tps: float = 0.0
    ttft_ms: float = 0.0
    context: int = 0  # number of tokens in the KV cache
    max_context: int = 0
    tokens: int = 0
    first_at: float = 0.0  # time (time.perf_counter()) at which the reply's first token arrived

    def after(self, chunk: Chunk, asked_at: float) -> "Meter":
        """Return the figures of the reply after one more chunk. The last chunk has the response, whose
        figures are exact.

        asked_at: the time (time.perf_counter()) at which the app asked for the reply.
        """
        if chunk.response:
            done = chunk.response
            tps = done.generation_tps or self.tps
            return replace(self, tps=tps, ttft_ms=done.ttft_ms, context=done.cache_tokens)
        if not chunk.generated:
            return replace(self, context=max(self.context, chunk.prefilled))
        now = time.perf_counter()
        first = self.first_at or now
        tps = (chunk.generated - 1) / (now - first) if chunk.generated > 1 and now > first else self.tps
        context = self.context + chunk.generated - self.tokens
        ttft = self.ttft_ms if self.first_at else (now - asked_at) * 1000
        return replace(self, tps=tps, ttft_ms=ttft, context=context, tokens=chunk.generated, first_at=first)

    def parts(self) -> list[str]:
        shown = []
        if self.tps:
            shown.append(f"{self.tps:.0f} tokens/s")
        if self.ttft_ms:
            shown.append(f"first word {seconds(self.ttft_ms)}")
        if self.context:
            of = f" of {self.max_context:,}" if self.max_context else ""
            shown.append(f"{self.context:,}{of} tokens")
        return shown


def learned_parts(learned: LearnStatus | None) -> list[str]:
    return [ratings_text(learned)] if learned else []


def room_parts(meter: Meter, room: ChatRoom, key: str) -> list[str]:
    """Return texts about messages that the model no longer reads, or about a context that is nearly full.

    key: the label of the key that starts a summary. The texts name the key only if a summary would replace
    messages.
    """
    told = [f"oldest {room.summed_up:,} summed up"] if room.summed_up else []
    offer = f" ({key} sums up)" if room.can_sum_up else ""
    if room.unread:
        told.append(f"oldest {room.unread:,} not read{offer}")
    elif meter.context > NEARLY_FULL * meter.max_context > 0:
        told.append(f"context nearly full{offer}")
    return told


def fit(left: str, parts: list[str], width: int) -> tuple[str, str]:
    """Return the left and the right text of the status line. If the `width` is too small for both, leave out
    the left text first. If the right text alone is too long, leave out parts of the right text, the first
    part first."""
    parts = list(parts)
    while parts and cell_len(GAP.join(parts)) > width:
        parts.pop(0)
    right = GAP.join(parts)
    room = width - cell_len(right) - 2
    return (left if cell_len(left) <= room else ""), right


class StatusLine(Static):
    backend: reactive[str] = reactive("")
    meter: reactive[Meter] = reactive(Meter)
    learned: reactive[LearnStatus | None] = reactive(None)
    room: reactive[ChatRoom] = reactive(ALL_READ)  # the messages that the model does not read
    background: reactive[str] = reactive("")  # a text about background work, which replaces the figures
    message: reactive[str] = reactive("")  # a text that replaces the whole line until the app clears the text
    _flashing: Timer | None = None

    def render(self) -> Content:
        width = self.size.width
        if self.message:
            return Content.styled(self.message, "$text-accent")
        if self.background:
            return Content(self.background)
        key = keys.key_label(self.app, "summarize", "F8")
        parts = self.meter.parts() + room_parts(self.meter, self.room, key) + learned_parts(self.learned)
        left, right = fit(self.backend, parts, width)
        return Content(left + " " * max(0, width - cell_len(left) - cell_len(right)) + right)

    def flash(self, message: str, seconds: float = 3.0) -> float:
        """Show a message for some seconds, or longer if the message is long. Return the number of seconds."""
        seconds = max(seconds, len(message) / READING_SPEED)
        self.message = message
        if self._flashing:
            self._flashing.stop()
        self._flashing = self.set_timer(seconds, lambda: self.end_message(message))
        return seconds

    def end_message(self, message: str) -> None:
        """Remove this message from the status line. Do nothing if the line shows another message."""
        if self.message == message:
            self.message = ""


class KeyHints(Static):
    """A line with the keys that work now, with the most useful key first. The line has as many keys as fit
    into its width. A click on a key runs the action of the key."""

    ORDER = (
        "Stop", "Don't edit", "Send", "Back", "Good", "Bad", "Stars", "Undo", "Thought", "Copy", "Switch",
        "Choose", "More", "Again", "Edit", "Take back", "Quit", "New line", "Rewrite", "Copy code", "Chats",
        "Write again",
    )  # fmt: skip
    HELP = "Help"  # the hint of the key F1, always at the end of the line
    GAP = 2  # number of terminal cells between two hints

    can_take_back: reactive[bool] = reactive(False)  # True if the line shows the key that undoes a rating

    def on_mount(self) -> None:
        self._spans: list[tuple[int, int, ActiveBinding]] = []
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.refresh())

    def render(self) -> Content:
        self._spans, line, at = [], Content(""), 0
        hints = [(active, self._hint(active)) for active in self._active()]
        room = self.size.width - sum(hint.cell_length for active, hint in hints if self._is_help(active))
        for active, hint in hints:
            is_help = self._is_help(active)
            if not is_help and at + hint.cell_length + self.GAP > room:
                continue
            self._spans.append((at, at + hint.cell_length, active))
            line, at = line + hint + " " * self.GAP, at + hint.cell_length + self.GAP
        return line.rstrip()

    def _is_help(self, active: ActiveBinding) -> bool:
        return active.binding.description == self.HELP

    def _hint(self, active: ActiveBinding) -> Content:
        key = self.app.get_key_display(active.binding)
        return Content.assemble((key, "$footer-key-foreground"), f" {active.binding.description}")

    def _active(self) -> list[ActiveBinding]:
        """Return one binding for each description, in the order of ORDER, with the help's key last. If two
        bindings have the same description, return the binding of the widget that has the focus."""
        shown: dict[str, ActiveBinding] = {}
        for active in self.screen.active_bindings.values():
            if active.binding.show and active.enabled and self._is_useful(active):
                shown.setdefault(active.binding.description, active)
        return [shown[name] for name in (*self.ORDER, self.HELP) if name in shown]

    def _is_useful(self, active: ActiveBinding) -> bool:
        """Return False for a key that takes feedback back, if there is no such feedback. "Undo" takes back
        the feedback on the selected reply, and "Take back" the newest feedback."""
        node, description = active.node, active.binding.description
        if description == "Undo" and isinstance(node, ReplyMessage):
            return node.has_feedback
        return self.can_take_back or description != "Take back"

    async def on_click(self, event: Click) -> None:
        for start, end, active in self._spans:
            if start <= event.x - self.gutter.left < end:
                await self.app.run_action(active.binding.action, active.node)
