"""This module has the widgets of the conversation: the user's messages, replies, tool calls, and notices of
the app."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.css.styles import RulesMap
from textual.reactive import var
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions
from textual.widgets import Markdown, Static

from ruvmlx.models.text.thinking import split
from ruvmlx.models.text.tool_calls import ParsedCall
from ruvmlx.runtime import PreferenceResult, RatingResult, Turn
from ruvmlx.text import sanitize

from ..wrapping import wrap_rows
from . import describe, mentions
from .code import code_blocks
from .markdown import ReplyMarkdown
from .tools.described import TEACHES_NOTHING, call_lines, short_lines
from .windowed import Windowed

ENDINGS = {
    "cancelled": "stopped · /more continues it",
    "length": "cut at the length limit · /more continues it",
    "repeats": "ended, because it only repeated itself; ratings of it teach nothing · /again writes another",
}


# titles of the line above the first message that the model reads
READ_FROM_HERE = "the model reads from here on"
READ_NOTES_AND_REST = "the model reads notes on what is above, and all from here on"
WHY_KEYS = {
    "greater_than_sign": "long",
    "less_than_sign": "short",
    "exclamation_mark": "tone",
    "question_mark": "facts",
}


class UserMessage(Static):
    branch: var[tuple[int, int]] = var((1, 1))  # number of this version of the question; number of versions

    def __init__(self, text: str, message_id: int | None = None) -> None:
        super().__init__(mentions.as_shown(sanitize(text)), markup=False)
        self.text = sanitize(text)
        self.message_id = message_id

    @classmethod
    def of_turn(cls, turn: Turn) -> "UserMessage":
        message = cls(turn.content)
        message.place(turn)
        return message

    def place(self, turn: Turn) -> None:
        """Take the id and the number of the version from the turn (message) that the store has saved."""
        self.message_id, self.branch = turn.id, (turn.branch, turn.branches)

    def watch_branch(self) -> None:
        where = describe.branch(*self.branch)
        lines = Content(mentions.as_shown(self.text)), Content(where).stylize("dim")
        self.update(Content("\n").join(line for line in lines if line))


class NoticeText(Content):
    """A text that can have tables. `wrap_rows` breaks the rows that are wider than the widget."""

    def at(self, width: int) -> Content:
        """Return the text as a widget of `width` columns shows it."""
        return Content(wrap_rows(self.plain, width))

    def get_height(self, rules: RulesMap, width: int) -> int:
        return self.at(width).get_height(rules, width)

    def render_strips(
        self, width: int, height: int | None, style: Style, options: RenderOptions
    ) -> list[Strip]:
        return self.at(width).render_strips(width, height, style, options)


class Notice(Static):
    """A text from the app, and not from the model. kind: "error" or "info"."""

    def __init__(self, text: str, kind: str = "info") -> None:
        self._text = NoticeText(sanitize(text))
        super().__init__(self._text, classes=kind)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """Return the selected part of the lines that the screen shows."""
        return selection.extract(self._text.at(self.content_size.width).plain), "\n"


class ToolMessage(Static):
    """A widget that shows a tool call and its result."""

    state: var[str] = var("")  # the line that the widget shows while the call has no result

    def __init__(self, call: ParsedCall, result: str | None = None, message_id: int | None = None) -> None:
        super().__init__(markup=False)
        self.call, self.result, self.message_id = call, result, message_id

    def place(self, turn: Turn) -> None:
        """Take the message id and the result of the tool call from the turn (message) that the store has
        saved."""
        self.message_id, self.result, self.state = turn.id, turn.content, ""
        self._show()

    def on_mount(self) -> None:
        self._show()

    def _show(self) -> None:
        head, *arguments = call_lines(self.call)
        lines = [f"⚒ {head}", *arguments]
        if self.result is not None:
            lines += [
                f"  → {line}" if n == 0 else f"    {line}" for n, line in enumerate(short_lines(self.result))
            ]
            lines.append(f"  {TEACHES_NOTHING}")
        elif self.state:
            lines.append(f"  {self.state}")
        self.update(Content("\n".join(lines)))

    watch_state = _show


class ReplyMessage(Windowed, Vertical, can_focus=True):
    """A widget that shows a reply, its rating, and a text that says what the rating changed.

    While the reply has the focus (the choose mode), keys without Ctrl act on the reply, as BINDINGS says. If
    the user types a character that is no key of BINDINGS, the app puts the character into the input.
    """

    BINDINGS: ClassVar = [
        Binding("plus,equals_sign", "app.do('rate.rate', 'up')", "Good", key_display="+"),
        Binding("minus", "app.do('rate.rate', 'down')", "Bad", key_display="-"),
        *[
            Binding(str(n), f"app.do('rate.rate', '{n}')", "Stars", key_display="1-5", show=n == 1)
            for n in range(1, 6)
        ],
        *[
            Binding(key, f"app.do('rate.give_reason', '{reason}')", "Why", show=False)
            for key, reason in WHY_KEYS.items()
        ],
        Binding("up,k", "app.do('select.select', -1)", "Choose", key_display="↑↓"),
        Binding("down,j", "app.do('select.select', 1)", "Next", show=False),
        Binding("u,backspace", "app.do('take_back')", "Undo", key_display="u"),
        Binding("r", "app.do('write.again')", "Again", key_display="r"),
        Binding("m", "app.do('write.more')", "More", key_display="m"),
        Binding("e", "app.do('write.edit')", "Edit", key_display="e"),
        Binding("E", "app.do('rewrite.begin')", "Rewrite", key_display="E"),
        Binding("c", "app.do('clipboard.copy_next_code')", "Copy code", key_display="c"),
        Binding("t", "unfold", "Thought", key_display="t"),
        Binding("y", "app.do('command', 'copy')", "Copy", key_display="y"),
        Binding("left,h", "app.do('write.flip', -1)", "Switch", key_display="←→"),
        Binding("right,l", "app.do('write.flip', 1)", "Switch on", show=False),
        Binding("escape", "app.stop_or_write", "Back", key_display="esc"),
        Binding("tab,shift+tab,enter", "app.write", "Write", show=False),
    ]

    reply_id: var[str | None] = var(None)
    rating: var[str | None] = var(None)
    progress: var[str] = var("")
    ending: var[str] = var("")
    chosen: var[str] = var("")  # lines about the writing: with --model auto, which model writes and why
    effect: var[str] = var("")
    asks_why: var[bool] = var(False)  # True after a bad rating without a reason, to show the question "Why?"
    branch: var[tuple[int, int]] = var((1, 1))  # number of this reply; number of replies to the question
    unfolded: var[bool] = var(False)  # True while the screen shows the reply's thought

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.text = sanitize(text)
        self.finished = bool(text)
        # True if chunks of the reply have arrived, which means that the runtime has accepted the user's
        # message
        self.begun = False
        self.message_id: int | None = None
        self.copied = 0  # the number of the reply's code block that was copied last, from 1; 0: none
        self._effect_of = 0  # the adapter version whose effect the text `effect` describes
        self.coming_rating = ""  # the rating that is being stored; "": none is
        # the text `effect` while this reply's rating is the newest feedback, and after newer feedback
        self._effects = ("", "")
        self._earlier = ""  # what the user said about the reply, without what it changed

    @classmethod
    def of_turn(cls, turn: Turn) -> "ReplyMessage":
        reply = cls(turn.content)
        reply.finished = True
        reply.set_reactive(ReplyMessage.reply_id, turn.reply_id)
        reply.set_reactive(ReplyMessage.rating, turn.rating)
        reply.set_reactive(ReplyMessage.ending, ENDINGS.get(turn.finish_reason or "", ""))
        reply.message_id = turn.id
        reply.set_reactive(ReplyMessage.branch, (turn.branch, turn.branches))
        return reply

    def place(self, turn: Turn) -> None:
        """Take the ids and the branch number of the reply from the turn (message) that the store has
        saved."""
        self.reply_id, self.message_id = turn.reply_id, turn.id
        self.branch = (turn.branch, turn.branches)

    @property
    def is_cut(self) -> bool:
        """True if the user stopped the reply, a limit cut it, or it ended because it only repeated itself."""
        return bool(self.ending)

    @property
    def has_feedback(self) -> bool:
        """True if the user rated the reply or preferred it to another reply."""
        return bool(self.rating or self.effect)

    def compose(self) -> ComposeResult:
        yield ReplyMarkdown(self.answer)

    @property
    def answer(self) -> str:
        """The text of the reply without its thought."""
        return split(self.text).answer

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "unfold" or bool(split(self.text).thought)

    def action_unfold(self) -> None:
        """Show the reply's thought. If the screen shows the thought already, hide it."""
        self.unfolded = not self.unfolded

    def on_mount(self) -> None:
        self._show_thought()
        self._show_note()

    @property
    def body(self) -> ReplyMarkdown:
        return self.query_children(ReplyMarkdown).first(ReplyMarkdown)

    def reopen(self) -> None:
        """Prepare the widget for more chunks of the reply."""
        self.finished = self.begun = False

    def begin(self) -> None:
        """Mark that chunks of the reply have come. Clear the ending and the rating, because the chunks can
        continue an earlier reply."""
        if not self.begun:
            self.begun, self.ending, self.rating, self.effect = True, "", None, ""
            self.asks_why = False

    @property
    def code_blocks(self) -> list[str]:
        """The text of each code block in the reply."""
        return code_blocks(self.answer)

    async def grow(self, text: str) -> None:
        """Append sanitised text to the reply."""
        self.progress = ""
        self.text += text
        self._show_thought()
        await self.body.show(self.answer)

    async def finish(self, text: str, ending: str) -> None:
        """Show the whole text of the reply, which gets no more chunks. ending: the reason why the reply
        ended; the widget shows a note about it if ENDINGS has this reason."""
        self.text, self.finished = sanitize(text), True
        self._show_thought()
        await self.body.show(self.answer, final=True)
        self.progress, self.ending = "", ENDINGS.get(ending, "")

    def show_rating(self, result: RatingResult, key: str) -> None:
        """Show what a rating of this reply changed. key: the label of the key that undoes the rating."""
        self._effects = (describe.effect(result, key), describe.effect(result, ""))
        self.rating, self.effect = result.rating, self._effects[0]
        self.asks_why = describe.asks_why(result)
        self._effect_of = result.adapter_version

    def show_preference(self, result: PreferenceResult, key: str) -> None:
        self._effects = (describe.preference(result, key), describe.preference(result, ""))
        self.effect, self._effect_of = self._effects[0], result.adapter_version

    def show_newest(self, is_newest: bool) -> None:
        """Name the key that undoes the rating only if the rating of this reply is the newest feedback,
        because the key takes back the newest feedback."""
        if self.effect:
            self.effect = self._effects[0 if is_newest else 1]

    def restore_rating(self, rating: str | None, version: int, earlier: str) -> None:
        """Show the rating that the store has for this reply. Remove the text that says what the rating
        changed, if this text belongs to another rating or to an adapter version that was undone. version: the
        adapter version in use. earlier: what the user said about the reply, to be shown if there is no such
        text"""
        if rating != self.rating or self._effect_of > version:
            self.rating, self.effect, self.asks_why = rating, "", False
        if self.effect == self._earlier or not self.effect:
            self.effect, self._earlier, self._effects = earlier, earlier, (earlier, earlier)

    def _show_thought(self) -> None:
        """Show one line about the reply's thought, or the whole thought. If the reply has no thought, hide
        the widget."""
        words = describe.thought_text(split(self.text), self.finished, self.unfolded)
        self._show_line("thought", Content(words))

    def _show_note(self) -> None:
        rating = describe.with_mark(self.effect, self.rating)
        where = " · ".join(filter(None, (self.chosen, describe.branch(*self.branch), self.ending)))
        why = describe.why_question(self.has_focus) if self.asks_why and not self.progress else ""
        lines = [line for line in (where, self.progress or rating, why) if line]
        if note := self._show_line("note", self._colour_mark("\n".join(lines))):
            note.set_class(bool(self.progress), "progress")

    def _show_line(self, name: str, words: Content) -> Static | None:
        """Show `words` in the widget above ("thought") or below ("note") the reply's text, or hide the widget
        if there are no words. Make the widget with the first words, because most replies have neither, and
        each widget takes time when a chat opens. Return None if there is no widget."""
        line = next((child for child in self.query_children(Static) if child.has_class(name)), None)
        if line is None:
            if not (words and self.children):  # without children it is not composed; on_mount calls again
                return None
            line = Static(markup=False, classes=name)
            self.mount(line, before=0 if name == "thought" else None)
        line.display = bool(words)
        line.update(words)
        return line

    def _colour_mark(self, text: str) -> Content:
        """Return `text`, which says what a rating changed, with the rating's mark in the colour of the
        rating."""
        mark = describe.rating_mark(self.rating) if self.rating else ""
        start = text.find(mark) if mark else -1
        colour = {"up": "$success", "down": "$error"}.get(self.rating or "", "$accent")
        return Content(text).stylize(colour, start, start + len(mark)) if start >= 0 else Content(text)

    watch_unfolded = _show_thought
    watch_rating = watch_progress = watch_ending = watch_effect = watch_branch = watch_asks_why = _show_note
    watch_chosen = _show_note

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        self._show_note()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Open a clicked link if the link is a web address. A link of another kind could open a file or a
        program."""
        event.stop()
        if event.href.startswith(("https://", "http://")):
            self.app.open_url(sanitize(event.href))


ChatMessage = UserMessage | ReplyMessage | ToolMessage


def message_of(turn: Turn) -> ChatMessage:
    """Return the widget of a turn."""
    if turn.role == "tool":
        return ToolMessage(turn.calls[0], turn.content, turn.id)
    return UserMessage.of_turn(turn) if turn.role == "user" else ReplyMessage.of_turn(turn)
