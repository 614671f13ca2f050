"""This module records implicit feedback: what the user does after a reply, without a rating."""

from ..engine.context_window import Turn
from .learning import Learning


class ImplicitFeedback:
    def __init__(self, learning: Learning, is_on: bool):
        self._learning, self._is_on = learning, is_on

    def notice_next(self, turns: list[Turn], before: list[Turn]) -> None:
        """Record feedback on a reply: "edited" on the reply to a question that the user replaces, "continued"
        on the last reply if the user sends the next message. before: the turns that stay before the user's
        new message."""
        if len(before) < len(turns):
            self.notice_of(next((t for t in turns[len(before) :] if t.reply_id), None), "edited")
        elif turns:
            self.notice_of(turns[-1], "continued")

    def notice_of(self, turn: Turn | None, what: str) -> None:
        """Record the feedback `what` on a reply, unless the user has rated or stopped the reply."""
        if not self._is_on or turn is None or turn.reply_id is None:
            return
        if turn.rating is None and turn.finish_reason != "cancelled":
            self._learning.notice(turn.reply_id, what)
