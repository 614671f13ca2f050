"""This module lets the user edit an earlier message in the input: a question, or a reply that the user
rewrites."""

from ..commands import typed_text
from ..context import ChatContext
from ..mentions import without_files
from ..messages import ReplyMessage, UserMessage
from ..prompt import EDITING, REWRITING


def text_to_edit(message: UserMessage | ReplyMessage) -> str:
    return message.answer if isinstance(message, ReplyMessage) else typed_text(without_files(message.text)[0])


class EditActions:
    def __init__(self, chat: ChatContext) -> None:
        self._chat = chat

    def begin(self, message: UserMessage | ReplyMessage, text: str) -> None:
        """Put the text of a new version of the message into the input."""
        self.leave()
        self._chat.editing = message
        self._chat.prompt.begin_edit(text, REWRITING if isinstance(message, ReplyMessage) else EDITING)

    def end(self) -> UserMessage | ReplyMessage | None:
        """End the edit and show the draft again. Return the message that the user edited, or None."""
        chat, edited = self._chat, self._chat.editing
        if edited:
            chat.editing = None
            chat.prompt.end_edit()
            chat.app.refresh_bindings()
        return edited

    def cancel(self) -> None:
        self.end()

    def leave(self) -> None:
        """Stop editing because something else begins. If the user has changed the text, the history of the
        input keeps it."""
        editing = self._chat.editing
        if editing and self._chat.prompt.text != text_to_edit(editing):
            self._chat.prompt.set_aside()
        self.end()

    def leave_hidden(self) -> None:
        """Stop editing a message that the screen no longer shows, because the chat shows another branch.
        Enter would send its text as a new message."""
        if self._chat.editing and not self._chat.editing.is_attached:
            self.leave()

    def put_back(self, typed: str, edited: int | None) -> None:
        """Put an unsent text back into the input. edited: the id of the earlier message that the text
        replaces; if the conversation shows this message, the user continues the edit."""
        shown = (m for m in self._chat.transcript.messages if edited is not None and m.message_id == edited)
        message = next((m for m in shown if isinstance(m, UserMessage | ReplyMessage)), None)
        if message is None:
            self._chat.prompt.put_back(typed)
        else:
            self.begin(message, typed)
        self._chat.prompt.returned = typed
