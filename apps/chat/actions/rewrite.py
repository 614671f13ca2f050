"""This module lets the user rewrite a reply in the app. The store keeps the user's version as a branch (an
alternative) beside the reply. If an adapter is in use, the model learns that the user prefers this version to
the reply."""

from functools import partial

from ruvmlx.runtime import EditedReply, Runtime

from .. import describe
from ..context import ChatContext
from ..messages import Notice, ReplyMessage
from ..view_model import Standing
from .edit import EditActions
from .rate import EFFECT_SHOWN, RateActions
from .write import ON_ANOTHER_BRANCH, WriteActions, watch_later


class RewriteActions:
    def __init__(self, chat: ChatContext, rate: RateActions, write: WriteActions, edit: EditActions) -> None:
        self._chat, self._rate, self._write, self._edit = chat, rate, write, edit

    def as_typed(self, argument: str) -> None:
        """Run the command `/rewrite [argument]` on the chosen reply: save the argument as the user's version
        of the reply. Without an argument, put the reply's text into the input, where the user can edit the
        text."""
        reply = self._reply_to_rewrite()
        if reply and argument:
            self.save(reply, argument)
        elif reply:
            self._edit.begin(reply, reply.answer)

    def begin(self) -> None:
        self.as_typed("")

    def _reply_to_rewrite(self) -> ReplyMessage | None:
        """Return the chosen reply. If the user can rewrite no reply now, say so and return None."""
        chat, reply = self._chat, self._chat.chosen_reply()
        if chat.phase != "idle" or reply is None or reply.message_id is None:
            chat.status.flash("There is no reply to rewrite yet")
            return None
        return reply

    def save(self, reply: ReplyMessage, text: str) -> None:
        """Save the text as the user's version of the reply. If the runtime refuses the text, put the text
        back into the input. The next message waits until the text is saved, because it follows the text."""
        reply.progress = "saving your version"
        self._chat.start_reply(partial(self._save, reply, text), "switching")

    async def _save(self, reply: ReplyMessage, text: str) -> None:
        chat, session, message = self._chat, self._chat.state.session, reply.message_id
        assert message is not None
        limit = chat.reply_limit

        def save(runtime: Runtime) -> tuple[EditedReply, Standing]:
            edited = runtime.chats.edit_reply(session, message, text)
            return edited, Standing.of(runtime, session, limit)

        done = await chat.attempt(save)
        reply.progress = ""
        if not done:
            self._edit.put_back(text, message)
            return
        hides_later = watch_later(chat.transcript)
        await self._write.show_turns()
        if hides_later():
            await chat.transcript.add(Notice(ON_ANOTHER_BRANCH))
        edited, standing = done
        self._rate.show(standing)
        if edited.preference is None:
            chat.status.flash(edited.failure or describe.NOTHING_LEARNED, EFFECT_SHOWN)
        else:
            self._rate.show_preference(edited.message, edited.preference)
            self._rate.tell_preference(edited.preference, describe.YOUR_VERSION)
