"""This module shows replies in a Jupyter notebook. The module needs the package extra `ruvmlx[notebook]`.

A reply appears piece by piece below the cell, with buttons to rate the reply.

import ruvmlx
from ruvmlx.notebook import show

model = ruvmlx.open()
chat = model.chat()
show(chat.stream("Why is the sky blue?"))
"""

import html
import time
from collections.abc import Callable
from typing import Any

from ..errors import RuvmlxError, error_line, extra_missing
from ..models.text.thinking import split
from ..text import sanitize
from .replies import Reply, ReplyStream
from .types import Rating

FRAME = 0.05  # seconds between two updates of a growing reply
# the buttons: (label, tooltip, rating)
RATINGS = (("Good", "More like this", "up"), ("Bad", "Less like this", "down"))


def show(reply: ReplyStream | Reply) -> None:
    """Show a reply below the cell, with buttons to rate the reply. A reply stream appears piece by piece.

    Raises RuvmlxError without the package ipywidgets.
    """
    view = ReplyView()
    from IPython.display import display

    show_box: Any = display  # without IPython, the type checker does not know the type of `display`
    show_box(view.box)
    view.show(reply)


class ReplyView:
    """A notebook widget with a reply, its rating and the buttons. The attribute `box` is the ipywidgets
    widget that contains the reply, the rating and the buttons. The user can click the buttons only when the
    reply is complete."""

    def __init__(self) -> None:
        widgets = _widgets()
        self.text, self.note = widgets.HTML(), widgets.HTML()
        self.buttons = {
            label: widgets.Button(description=label, tooltip=tip, disabled=True) for label, tip, _ in RATINGS
        }
        self.undo = widgets.Button(
            description="Take back", tooltip="Undo the rating of this reply", disabled=True
        )
        for label, _, rating in RATINGS:
            self.buttons[label].on_click(self._handler(self._rate, rating))
        self.undo.on_click(self._handler(self._take_back))
        row = widgets.HBox([*self.buttons.values(), self.undo, self.note])
        self.box = widgets.VBox([self.text, row])
        self.reply: Reply | None = None

    def show(self, reply: ReplyStream | Reply) -> None:
        """Show the reply piece by piece, in place of an earlier reply. A keyboard interrupt stops the reply
        and keeps the text so far."""
        self.note.value = ""
        for button in (*self.buttons.values(), self.undo):
            button.disabled = True
        if isinstance(reply, ReplyStream):
            reply = self._follow(reply)
        self.reply = reply
        self._draw(reply.text)
        for button in self.buttons.values():
            button.disabled = False

    def _follow(self, stream: ReplyStream) -> Reply:
        text, drawn = "", 0.0
        try:
            for piece in stream:
                text += piece
                if time.monotonic() - drawn > FRAME:
                    self._draw(text)
                    drawn = time.monotonic()
        except KeyboardInterrupt:
            stream.stop()
        return stream.reply

    def _draw(self, text: str) -> None:
        """Show `text` as plain text, with HTML characters escaped."""
        words = html.escape(sanitize(split(text).answer))
        self.text.value = f'<div style="white-space: pre-wrap; line-height: 1.5">{words}</div>'

    def _handler(self, work: Callable[..., str], *arguments: str) -> Callable[[Any], None]:
        """Return a click handler that does the work and shows the result or the error beside the buttons."""

        def handle(_: Any) -> None:
            try:
                told = work(*arguments)
            except RuvmlxError as error:
                told = error_line(error)
            self.note.value = html.escape(told)

        return handle

    def _rate(self, rating: str) -> str:
        assert self.reply is not None
        done = self.reply.rate(rating)
        self.undo.disabled = False
        return effect(done)

    def _take_back(self) -> str:
        assert self.reply is not None
        reply_id, learns = self.reply.id, self.reply.adapter
        self.reply._owner._call(lambda runtime: runtime.unrate(reply_id, learns))
        self.undo.disabled = True
        return "Taken back, as if it had never been given"


def effect(done: Rating) -> str:
    """Return a sentence that says whether the rating changed the weights, and in which direction."""
    if not done.applied:
        return "Kept; it changed nothing"
    return f"Learned: {'more' if done.logprob_after >= done.logprob_before else 'less'} like this"


def _widgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise RuvmlxError(
            f"replies in a notebook need the package ipywidgets; {extra_missing('notebook')}."
        ) from None
    return ipywidgets
