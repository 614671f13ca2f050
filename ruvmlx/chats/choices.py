"""This module learns from preferences between replies: the user chooses one of two replies, edits a reply, or
continues a chat from one of several replies."""

import contextlib
from dataclasses import dataclass, replace

from ..engine.context_window import Turn
from ..errors import AdapterMismatch, NotFound, RuvmlxError, UsageError
from ..models.config.model import Model
from ..sona.edited_reply import edited_reply
from ..sona.learner import Learner
from ..sona.state import PreferenceResult, RatingResult
from ..store import MessageRow, ReplyRow, Store
from .learning import Learning

# the strength (1: a full preference) of the preference for the reply from which the user continued the chat
REGENERATED = 0.3


@dataclass(frozen=True)
class EditedReply:
    """A saved new version of a reply that the user edited. message: the id of the new message; None: the
    reply is in no chat. preference: the result of learning from the edit; None: no adapter is in use, or
    learning failed. failure: the reason why learning failed."""

    reply_id: str
    message: int | None
    preference: PreferenceResult | None = None
    failure: str = ""


@dataclass(frozen=True)
class Continuation:
    """A preference that the adapter learned from a message after one of several replies to a question.
    message: the id of the preferred reply's message."""

    message: int | None
    learned: PreferenceResult


class Choices:
    """This class receives preferences between replies of one model, and reasons for bad ratings. The adapter
    in use, or the adapter that the caller names, learns from each preference immediately, and from each
    reason except "facts"."""

    def __init__(self, store: Store, model: Model, learning: Learning):
        self._store, self._model, self._learning = store, model, learning
        # chat id -> what the user's last message taught, until an app takes it
        self._continued: dict[str, Continuation] = {}

    def prefer(self, better: str, worse: str, adapter: str | None = None) -> PreferenceResult:
        """Learn that one of two replies to one question is better. adapter: the adapter that learns; None:
        the adapter in use. Raises NotFound if no adapter is in use, and UsageError for two replies with the
        same words."""
        with self._learning.using(adapter) as learner:
            # The text of a reply has no tool calls, so compare the tokens.
            said = [learner.rateable(reply_id).sampled_ids for reply_id in (better, worse)]
            if better != worse and said[0] == said[1]:
                raise UsageError("the two replies have the same words, so neither is better.")
            return learner.prefer(better, worse, "compare")

    def give_reason(self, reply_id: str, reason: str, adapter: str | None = None) -> RatingResult:
        """Record why a reply (its id, or "last") was rated bad: "long", "short", "tone" or "facts". The
        adapter does not learn from a rating with the reason "facts" (wrong facts). adapter: the adapter that
        learns; None: the adapter in use."""
        with self._learning.using(adapter) as learner:
            return learner.give_reason(reply_id, reason)

    def rewrite(self, reply_id: str, text: str, adapter: str | None = None) -> PreferenceResult:
        """Save the user's version of a reply, as `edit` does, if the caller does not know the reply's chat.
        Return the result of learning. adapter: the adapter that learns; None: the adapter in use. If no
        adapter is in use, raise NotFound and save nothing. If learning fails, raise RuvmlxError; the version
        is saved."""
        with self._learning.using(adapter) as learner:
            edited = self._saved_edit(reply_id, text, None, learner)
        if edited.preference is None:
            raise RuvmlxError(edited.failure)
        return edited.preference

    def edit(self, reply_id: str, text: str, place: tuple[str, int] | None = None) -> EditedReply:
        """Save the user's version of a reply beside the reply, on a new branch of the chat. If an adapter is
        in use, it learns that the user's version is better.

        text: the new answer; the reply's thinking is kept. place: (chat, message) of the reply; None: the
            place where the reply was shown last. Raises UsageError for an empty, unchanged or too long text,
            AdapterMismatch for a reply of another model, and NotFound for a reply whose chat was deleted.
        """
        return self._saved_edit(reply_id, text, place, self._learning.learner)

    def _saved_edit(
        self, reply_id: str, text: str, place: tuple[str, int] | None, learner: Learner | None
    ) -> EditedReply:
        original = self._store.replies.get(reply_id)
        edited = self._edited_row(original, text)
        session, message = place or self._store.messages.place_of(original.id) or (None, None)
        if session is None and self._store.messages.is_in_deleted_chat(original.id):
            raise NotFound(
                "that reply's chat was deleted, so it cannot be rewritten; "
                "`ruvmlx sessions restore` lists the chats that can come back."
            )
        self._store.replies.add(edited, session, beside=message)
        saved = EditedReply(edited.id, self._store.messages.head(session) if session is not None else None)
        if learner is None:
            return saved
        try:
            return replace(saved, preference=learner.prefer(edited.id, original.id, "edit"))
        # The new version is saved already. An error from `edit` would make the user save the version again.
        except RuvmlxError as e:
            return replace(saved, failure=f"your version is saved, but nothing was learned from it: {e}")

    def _edited_row(self, original: ReplyRow, text: str) -> ReplyRow:
        if original.fingerprint != self._model.fingerprint:
            raise AdapterMismatch(
                f"{original.model} wrote that reply, and only that model can learn from your version; "
                f"the open model is {self._model.name}."
            )
        edited = edited_reply(self._model.tokenizer, original, text)
        context = self._model.context
        tokens = len(edited.prompt_ids) + len(edited.sampled_ids)
        if tokens > context:
            raise UsageError(
                f"the edited reply needs {tokens} tokens of context; the model has {context}. Shorten it."
            )
        return edited

    def learn_from_continuation(self, session_id: str, turn: Turn) -> PreferenceResult | None:
        """Learn from a user who sends a message after a reply that has alternatives: the user prefers this
        reply to the newest alternative.

        Returns None and learns nothing if, for example, the user has seen no other complete reply, the store
        already has a preference between the two replies, both replies have ratings, or no adapter is in use
        (`_other`). The method suppresses errors of learning, because an error must not stop the user's
        message.
        """
        learner, mine = self._learning.learner, turn.reply_id
        if learner is None or mine is None or turn.branches < 2:
            return None
        with contextlib.suppress(RuvmlxError):
            other = self._other(session_id, turn)
            if other is not None and not learner.history.pairs.between(mine, other):
                learned = learner.prefer(mine, other, "regenerated", REGENERATED)
                self._continued[session_id] = Continuation(turn.id, learned)
                return learned
        return None

    def take_continuation(self, session_id: str) -> Continuation | None:
        """Return, once, what the user's last message of a chat taught by `learn_from_continuation`. Return
        None if it taught nothing."""
        return self._continued.pop(session_id, None)

    def _other(self, session_id: str, turn: Turn) -> str | None:
        """Return the newest other reply to the same question. Return None if there is no other reply, if both
        replies have ratings, or if a preference between the two replies would say nothing about the user's
        taste."""
        rows = self._store.messages.all(session_id)
        mine = next((row for row in rows if row.id == turn.id), None)
        if mine is None:  # another process has deleted the chat
            return None
        here = [row for row in rows if row.parent == mine.parent and self._counts(row)]
        compared = self._of_comparisons([row for row in rows if row.parent == mine.parent])
        others = [row for row in here if row.id != mine.id and row.id not in compared]
        if mine not in here or mine.id in compared or not others:
            return None
        # Only the newest other reply is compared. If one reply continues the other, both begin with the same
        # text (`same`), so the user has made no choice.
        other = others[-1]
        same = mine.content.startswith(other.content) or other.content.startswith(mine.content)
        # /compare, or the router, writes some replies with the untouched model. If one of two replies comes
        # from the untouched model and the user made no choice, the pair says nothing about the user's taste.
        differ = self._is_untouched(mine) != self._is_untouched(other)
        return None if same or differ or (mine.rating and other.rating) else other.reply_id

    def _of_comparisons(self, siblings: list[MessageRow]) -> set[int]:
        """Return the ids of the replies that /compare or /effect wrote beside an earlier reply. The user
        asked for them to see what was learned, and not because the user disliked the earlier reply. Such
        replies are two in a row, exactly one of them by the untouched model. A reply next to such a pair can
        be among the ids, too. siblings: all replies to one question, the oldest first."""
        replies = [row for row in siblings if row.reply_id is not None]
        untouched = [self._is_untouched(row) for row in replies]
        pairs = [n for n in range(1, len(replies) - 1) if untouched[n] != untouched[n + 1]]
        return {replies[at].id for n in pairs for at in (n, n + 1)}

    def _is_untouched(self, row: MessageRow) -> bool:
        """Return True if the model wrote the reply without a trained adapter (version 0)."""
        assert row.reply_id is not None
        return self._store.replies.get(row.reply_id).adapter_version == 0

    def _counts(self, row: MessageRow) -> bool:
        """Return True if this model wrote the reply, the user did not stop it, the user saw it, and it is not
        a version that the user edited."""
        if row.reply_id is None or row.finish_reason == "cancelled":
            return False
        reply = self._store.replies.get(row.reply_id)
        return reply.fingerprint == self._model.fingerprint and not (reply.beside or reply.edited)
