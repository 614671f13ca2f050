"""This module ends the app when the user enters a command, presses a key, or presses Ctrl+C twice."""

import asyncio
import time

from ..context import ChatContext
from .clipboard import ClipboardActions
from .write import WriteActions

QUIT_WINDOW = 2.0  # seconds: the least time for the second Ctrl+C; a long message gives more time


class LeaveActions:
    def __init__(self, chat: ChatContext, write: WriteActions, clipboard: ClipboardActions) -> None:
        self._chat, self._write, self._clipboard = chat, write, clipboard
        self._quit_until = 0.0  # before this time (time.monotonic()), a Ctrl+C ends the app

    def leave_as_typed(self, _: str) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop the tool servers and close the runtime (the model and its store), then end the app. In a chat
        on a server, the runtime stays open."""
        if self._chat.phase != "closing":
            self._chat.phase = "closing"
            self._chat.status.message = "Closing…"
            self._chat.start(self._close)

    async def _close(self) -> None:
        failure = None
        try:
            await asyncio.to_thread(self._chat.state.tools.close)
            await self._chat.host.close()
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            failure = error
        self._chat.app.end(failure)

    def interrupt(self) -> None:
        """Copy the selected text, because the user pressed Ctrl+C. If no text is selected, stop the reply or
        the opening of a model. If no work can be stopped, move the text of the input to the history and show
        a message. A second Ctrl+C during the time of this message ends the app, if the input has no text."""
        if self._clipboard.copy_selected_text():
            return
        if self._chat.can_stop:
            self._write.stop()
        elif time.monotonic() < self._quit_until and not self._chat.prompt.text.strip():
            self.leave()
        else:
            kept = "The text is kept: ↑ shows it. " if self._chat.prompt.clear_into_history() else ""
            shown = self._chat.status.flash(f"{kept}Press again to quit", QUIT_WINDOW)
            self._quit_until = time.monotonic() + shown
