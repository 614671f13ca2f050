"""This module copies text from the conversation. If the user copies a reply and the setting
`implicit_feedback` is on, the runtime records the copy as a sign that the user likes the reply."""

import asyncio
from collections.abc import Callable

from ruvmlx.errors import NotFound

from .. import clipboard
from ..arguments import parse_number
from ..context import ChatContext
from ..messages import ReplyMessage
from .rate import RateActions


class ClipboardActions:
    def __init__(self, chat: ChatContext, rate: RateActions) -> None:
        self._chat, self._rate = chat, rate

    def copy(self, argument: str = "") -> None:
        """Copy the chosen reply, or else the newest complete reply, which can be imported. If `argument` is a
        number, copy the reply's code block with this number."""
        newest = reversed(self._chat.transcript.messages)
        complete = (m for m in newest if isinstance(m, ReplyMessage) and m.finished)
        reply = self._chat.chosen_reply() or next(complete, None)
        if reply is None:
            raise NotFound("there is no reply to copy yet")
        blocks = reply.code_blocks
        number = parse_number(argument, len(blocks), "code block")
        self._chat.app.copy_to_clipboard(reply.answer if number is None else blocks[number - 1])
        self._rate.notice([reply.reply_id], "copied")
        self._chat.status.flash(
            "Copied" if number is None else f"Copied code block {number} of {len(blocks)}"
        )

    def copy_next_code(self) -> None:
        """Copy a code block of the chosen reply. The first call copies the first block of the reply, and each
        further call copies the next block; the first block follows the last block."""
        reply = self._chat.chosen_reply()
        blocks = reply.code_blocks if reply else []
        if reply is None or not blocks:
            return
        reply.copied = reply.copied % len(blocks) + 1
        self.copy(str(reply.copied))

    def copy_selected_text(self) -> bool:
        """Copy the selected text of the input or of the screen. Return False if no text is selected."""
        app = self._chat.app
        text = self._chat.prompt.selected_text or app.screen.get_selected_text()
        if text:
            app.copy_to_clipboard(text)
            self._chat.status.flash("Copied")
            app.screen.clear_selection()
        return bool(text)

    def to_system(self, text: str, to_terminal: Callable[[str], None]) -> None:
        """Copy the text in a separate thread: with the function `copies` of the chat's options, or if the
        options have no such function, with a tool of the system.

        to_terminal: a function that copies through the terminal, for the case that `copies` or the tool did
        not copy the text, for example because there is no tool.
        """
        self._chat.start(lambda: self._to_system(text, to_terminal))
        screen = self._chat.app.screen
        if text == screen.get_selected_text():
            within = (node for widget in screen.selections for node in widget.ancestors_with_self)
            replies = {node.reply_id for node in within if isinstance(node, ReplyMessage)}
            self._rate.notice(replies, "copied")

    async def _to_system(self, text: str, to_terminal: Callable[[str], None]) -> None:
        copies = self._chat.options.copies or clipboard.copy_with_tool
        if not await asyncio.to_thread(copies, text):
            to_terminal(text)
