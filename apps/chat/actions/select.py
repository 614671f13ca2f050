"""This module gives replies the focus when the user presses a key, and scrolls the conversation."""

from functools import partial

from ..context import ChatContext
from ..messages import ReplyMessage


class SelectActions:
    def __init__(self, chat: ChatContext) -> None:
        self._chat = chat

    def select(self, step: int) -> None:
        """Give the focus to the reply that is `step` places after the selected reply in the conversation, but
        not past the first or last reply. If no reply is selected, count from the lowest reply on the screen.
        0 means this reply, and -1 means the reply before it."""
        transcript, reply = self._chat.transcript, self._chat.reply_in_view()
        if not reply:
            return
        if step < 0 and transcript.has_earlier and reply is transcript.replies[0]:
            self._chat.start(partial(self._select_earlier, reply, step))
        else:
            self._chat.app.screen.set_focus(transcript.neighbour(reply, step))

    async def _select_earlier(self, reply: ReplyMessage, step: int) -> None:
        await self._chat.transcript.load_earlier()
        self._chat.transcript.neighbour(reply, step).focus()

    def scroll(self, pages: int) -> None:
        self._chat.start(partial(self._scroll, pages))

    async def _scroll(self, pages: int) -> None:
        transcript, panel = self._chat.transcript, self._chat.panel
        if panel.covers:
            panel.scroll_relative(y=pages * max(1, panel.size.height - 1), animate=False)
            return
        if pages < 0 and transcript.scroll_y <= 0:
            await transcript.load_earlier()
        if pages > 0 and transcript.is_vertical_scroll_end:
            return  # at the end, a scroll would only stop the transcript from following a growing reply
        transcript.scroll_relative(y=pages * (transcript.size.height - 2), animate=False)
