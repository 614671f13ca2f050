"""Saved chats: create, find, name, fork, soft-delete and delete them."""

import math
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ..errors import NotFound, StoreError
from .database import Database
from .messages import ERASING, MessageRow, Messages
from .replies import Replies
from .search_index import SearchIndex

FILLING = -1.0  # in place of a time of deletion: a process writes the chat's messages
_FILLING_SLICE = 0.05  # seconds of one transaction that fills it, and between two of them
_FILLING_SECONDS = 3600.0  # after its last message, such a chat belongs to a process that was killed
TITLE = 200  # longest title, in characters
_SLICE = 50  # messages that one transaction erases: about 30 ms
_LONGEST_PAUSE = 0.1  # seconds between two of them
_SELECT = (
    "SELECT s.id, s.title, s.system, s.model, s.updated, s.created,"
    " (SELECT count(*) FROM messages WHERE session_id = s.id) AS turns FROM sessions s "
)


@dataclass(frozen=True)
class SessionRow:
    """One chat. updated, created: seconds since 1970."""

    id: str
    title: str
    system: str | None
    model: str
    turns: int  # messages of all branches
    updated: float
    created: float = 0.0


class Chats:
    """The table `sessions`. A soft-deleted chat has the time of its deletion in `deleted`, one that is being
    erased has ERASING there, one that is being filled FILLING."""

    def __init__(self, db: Database, messages: Messages, replies: Replies, index: SearchIndex):
        self._db, self._messages, self._replies, self._index = db, messages, replies, index

    def new(self, model: str, system: str | None = None, title: str = "") -> str:
        """Create an empty chat; returns its id."""
        session_id, now = uuid.uuid4().hex[:12], time.time()
        with self._db.transaction():
            self._db.insert(
                "sessions", id=session_id, title=title, system=system, model=model, created=now, updated=now
            )
        return session_id

    def fork(self, session_id: str, after: int | None = None) -> str:
        """Copy the current branch up to a message (None: all of it) into a new chat; returns its id.

        Both chats show the same replies, with their ratings.
        """
        old, branch = self.get(session_id), self._messages.branch(session_id)
        ids = [message.id for message in branch]
        if after is not None and after not in ids:
            raise NotFound(f"message {after} is not in the conversation.")
        kept = branch[: ids.index(after) + 1] if after is not None else branch
        with self._db.transaction():
            new = self.new(old.model, old.system, f"{old.title} (fork)"[:TITLE])
            self._messages.add_tree(new, kept, kept[-1].id if kept else None)
        return new

    def add(
        self,
        model: str,
        system: str | None,
        title: str,
        messages: Iterable[MessageRow],
        head: int | None,
    ) -> str:
        """Commit a chat with all its messages, parents before children; returns its id. head: one of them.

        Many short transactions write it, so that other processes can write meanwhile. It is hidden until it
        is whole; what a killed process has left of it is erased at a start an hour later.
        """
        with self._db.transaction():
            new = self.new(model, system, title)
            self._set(new, "deleted", FILLING)
        try:
            self._messages.add_tree(new, messages, head, _FILLING_SLICE)
            self._set(new, "deleted", None)
        except BaseException:
            with suppress(StoreError):
                self.delete(new)
            raise
        return new

    # -- finding -------------------------------------------------------------------------------------

    def get(self, session_id: str) -> SessionRow:
        """A chat by its whole id, soft-deleted or not. NotFound if there is none."""
        row = self._db.row(_SELECT + "WHERE s.id = ?", session_id)
        if row is None:
            raise NotFound(f"no chat {session_id!r}; `ruvmlx sessions ls` lists them.")
        return SessionRow(**row)

    def find(self, beginning: str) -> str:
        """The id of a chat, from a unique beginning of the id, or "last". NotFound if there is none."""
        if beginning == "last":
            found = [row.id for row in self.all()[:1]]
        else:
            found = self._ids_beginning_with(beginning, "deleted IS NULL")
        if not found:
            raise NotFound(f"no chat {beginning!r}; `ruvmlx sessions ls` lists them.")
        return found[0]

    def all(self) -> list[SessionRow]:
        """Chats that have a message and are not soft-deleted, newest first."""
        rows = self._db.rows(
            _SELECT + "WHERE s.deleted IS NULL AND EXISTS"
            " (SELECT 1 FROM messages WHERE session_id = s.id) ORDER BY s.updated DESC"
        )
        return [SessionRow(**row) for row in rows]

    def ids(self) -> set[str]:
        """Ids of all chats, empty and soft-deleted ones included."""
        return {row["id"] for row in self._db.rows("SELECT id FROM sessions")}

    def _ids_beginning_with(self, beginning: str, where: str) -> list[str]:
        """The one id with this beginning, or nothing. NotFound if there are several."""
        found = self._db.rows(
            f"SELECT id FROM sessions WHERE substr(id, 1, ?1) = ?2 AND {where} LIMIT 2",
            len(beginning),
            beginning,
        )
        if beginning and len(found) > 1:
            raise NotFound(f"{beginning!r} is the beginning of more than one chat's id; give more of it.")
        return [row["id"] for row in found if beginning]

    # -- changing ------------------------------------------------------------------------------------

    def set_system(self, session_id: str, system: str | None) -> None:
        """Change the system prompt; None removes it."""
        self._set(session_id, "system", system)

    def set_title(self, session_id: str, title: str) -> None:
        self._set(session_id, "title", " ".join(title.split())[:TITLE])

    def _set(self, session_id: str, column: str, value: str | float | None) -> None:
        with self._db.transaction():
            self._db.execute(f"UPDATE sessions SET {column} = ? WHERE id = ?", value, session_id)

    # -- soft deletion -------------------------------------------------------------------------------

    def soft_delete(self, session_id: str) -> None:
        """Hide a chat. `restore` shows it again, until `delete` removes it."""
        self._hide(session_id, time.time())

    def restore(self, session_id: str) -> None:
        """Show a hidden chat again. NotFound if `delete` has begun to erase it."""
        self._hide(session_id, None)

    def _hide(self, session_id: str, when: float | None) -> None:
        with self._db.transaction():
            self.get(session_id)
            if self._db.value("SELECT deleted FROM sessions WHERE id = ?", session_id) in (ERASING, FILLING):
                raise NotFound(f"chat {session_id!r} is being deleted for good.")
            self._set(session_id, "deleted", when)

    def soft_deleted(self) -> list[SessionRow]:
        """The chats that `restore` can show again, the one deleted last first."""
        rows = self._db.rows(_SELECT + "WHERE s.deleted > ? ORDER BY s.deleted DESC", ERASING)
        return [SessionRow(**row) for row in rows]

    def find_soft_deleted(self, beginning: str) -> str:
        """The id of a soft-deleted chat, from a unique beginning of the id, or "last"."""
        if beginning == "last":
            found = [row.id for row in self.soft_deleted()[:1]]
        else:
            found = self._ids_beginning_with(beginning, f"deleted > {ERASING}")
        if not found:
            raise NotFound(
                f"no deleted chat {beginning!r}; `ruvmlx sessions restore` lists what can come back."
            )
        return found[0]

    def soft_deleted_before(self, when: float) -> list[str]:
        """Ids of the chats that were soft-deleted before a time (seconds since 1970), and of those that a
        killed process has not erased, or filled, to the end."""
        rows = self._db.rows(
            f"SELECT id FROM sessions WHERE deleted < ? AND (deleted != {FILLING} OR updated < ?)",
            when,
            time.time() - _FILLING_SECONDS,
        )
        return [row["id"] for row in rows]

    # -- deletion ------------------------------------------------------------------------------------

    def delete(self, *session_ids: str, seconds: float = math.inf) -> bool:
        """Delete chats and their replies for good; replies that another chat (a fork) shows stay.

        A reply with a rating or preference loses its words and notes and keeps that. The witness log keeps
        every reply's id and length. seconds: for the search index, which may need longer; a later call
        continues. Returns whether the words are gone from all files, as `Database.truncate_log` does.

        All chats are hidden in one transaction. Then many short ones erase them, so that other processes can
        write meanwhile; after a kill, the next start finds them by `soft_deleted_before`.
        """
        with self._db.transaction():
            for session_id in session_ids:
                self.get(session_id)
                self._set(session_id, "deleted", ERASING)
        for session_id in session_ids:
            while self._erase_some(session_id):
                pass
        return self.clean_index(seconds)

    def clean_index(self, seconds: float) -> bool:
        """Continue with the search index for about this long; returns as `delete`."""
        return self._index.clean(seconds) and self._db.truncate_log()

    def _erase_some(self, session_id: str) -> bool:
        """Commit the deletion of the newest messages; of the chat itself if it has none, then False."""
        began = time.monotonic()
        with self._db.transaction():
            unseen = self._messages.delete_newest(session_id, _SLICE)
            if unseen is None:
                self._db.execute("DELETE FROM sessions WHERE id = ?", session_id)
                return False
            self._replies.erase(*unseen)
        time.sleep(min(time.monotonic() - began, _LONGEST_PAUSE))  # see SearchIndex.clean
        return True
