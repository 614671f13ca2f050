"""This module creates, finds, names, forks, soft-deletes and deletes the chats in the store."""

import math
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..errors import NotFound, StoreError
from .database import Database
from .messages import ERASING, MessageRow, Messages
from .replies import Replies
from .search_index import SearchIndex

# this value in place of a time of deletion means that a process is still writing the chat's messages
FILLING = -1.0
_FILLING_SLICE = 0.05  # seconds: the length of a transaction that writes messages, and of the pause after it
# If an incomplete chat gets no message for this number of seconds, the program treats the process that wrote
# the chat as killed.
_FILLING_SECONDS = 3600.0
TITLE = 200  # the maximum number of characters in a title
_SLICE = 50  # the number of messages that one transaction erases: about 30 ms
_LONGEST_PAUSE = 0.1  # the maximum number of seconds between two transactions that erase messages
_SELECT = (
    "SELECT s.id, s.title, s.system, s.model, s.updated, s.created, s.pinned,"
    " s.summary, s.summarized_to, s.folder,"
    " (WITH RECURSIVE branch(id) AS (SELECT s.head UNION ALL"
    " SELECT m.parent FROM branch JOIN messages m ON m.id = branch.id)"
    " SELECT count(id) FROM branch) AS turns FROM sessions s "
)


@dataclass(frozen=True)
class SessionRow:
    """One chat.

    turns: the number of messages of the current branch
    updated, created: seconds since 1970
    pinned: 1 if lists show this chat before other chats
    summary: the text that the model reads instead of the messages up to `summarized_to`; None: no summary
    folder: the name of the group in which lists show the chat; "": no group
    """

    id: str
    title: str
    system: str | None
    model: str
    turns: int
    updated: float
    created: float = 0.0
    pinned: int = 0
    summary: str | None = None
    summarized_to: int | None = None
    folder: str = ""


class Chats:
    """This class reads and writes the table `sessions`. The column `deleted` holds the time of a soft
    deletion, ERASING while the chat is being erased, or FILLING while its messages are being written."""

    def __init__(self, db: Database, messages: Messages, replies: Replies, index: SearchIndex):
        self._db, self._messages, self._replies, self._index = db, messages, replies, index

    def new(self, model: str, system: str | None = None, title: str = "") -> str:
        """Create an empty chat and return its id."""
        session_id, now = uuid.uuid4().hex[:12], time.time()
        with self._db.transaction():
            self._db.insert(
                "sessions", id=session_id, title=title, system=system, model=model, created=now, updated=now
            )
        return session_id

    def fork(self, session_id: str, after: int | None = None) -> str:
        """Copy the current branch up to a message (None: the whole branch) into a new chat. Returns the new
        id.

        The old chat and the new chat show the same replies, with the same ratings.
        """
        with self._db.transaction():
            old, branch = self.get(session_id), self._messages.branch(session_id)
            ids = [message.id for message in branch]
            if after is not None and after not in ids:
                raise NotFound(f"message {after} is not in the conversation.")
            kept = branch[: ids.index(after) + 1] if after is not None else branch
            new = self.new(old.model, old.system, f"{old.title} (fork)"[:TITLE])
            copies = self._messages.add_tree(new, kept, kept[-1].id if kept else None)
            if old.summarized_to in copies:
                self.set_summary(new, old.summary, copies[old.summarized_to])
        return new

    def add(
        self,
        model: str,
        system: str | None,
        title: str,
        messages: Iterable[MessageRow],
        head: int | None,
        created: float = 0.0,
        updated: float = 0.0,
        summary: str | None = None,
        summarized_to: int | None = None,
    ) -> str:
        """Commit a chat with all its messages and return its id.

        Many short transactions write the chat, so other processes can write in between. The chat is hidden
        until it is complete. If the process is killed, a start of the program at least an hour later erases
        the incomplete chat.

        messages: parents before children
        head: the id of the last message of the current branch
        created, updated: seconds since 1970; 0 is now
        summary, summarized_to: as in SessionRow; if no message has the id `summarized_to`, the chat gets no
            summary
        """
        with self._db.transaction():
            new = self.new(model, system, title)
            self._set(new, "deleted", FILLING)
        try:
            copies = self._messages.add_tree(new, messages, head, _FILLING_SLICE)
            with self._db.transaction():
                self._set(new, "deleted", None)
                if summary and (last := copies.get(summarized_to)):
                    self.set_summary(new, summary, last)
                for column, when in (("created", created), ("updated", updated)):
                    if when:
                        self._set(new, column, when)
        except BaseException:
            with suppress(StoreError):
                self.delete(new)
            raise
        return new

    # -- finding -------------------------------------------------------------------------------------

    def get(self, session_id: str) -> SessionRow:
        """Return the chat with this full id. The chat can be soft-deleted. Raises NotFound if no chat has
        this id."""
        row = self._db.row(_SELECT + "WHERE s.id = ?", session_id)
        if row is None:
            raise NotFound(f"no chat {session_id!r}; `ruvmlx sessions ls` lists the chats.")
        return SessionRow(**row)

    def find(self, beginning: str) -> str:
        """Return the id of a chat from a unique beginning of the id, or from "last". Raises NotFound if no
        chat or several chats match."""
        if beginning == "last":
            found = [row.id for row in self.all()[:1]]
        else:
            found = self._ids_beginning_with(beginning, "deleted IS NULL")
        if not found and beginning == "last":
            raise NotFound("there is no chat yet; `ruvmlx chat` begins one.")
        if not found:
            raise NotFound(f"no chat {beginning!r}; `ruvmlx sessions ls` lists the chats.")
        return found[0]

    def all(self) -> list[SessionRow]:
        """Return the chats that have a message and are not soft-deleted, the last changed chat first."""
        rows = self._db.rows(
            _SELECT + "WHERE s.deleted IS NULL AND EXISTS"
            " (SELECT 1 FROM messages WHERE session_id = s.id) ORDER BY s.updated DESC"
        )
        return [SessionRow(**row) for row in rows]

    def beginning_with(self, system: str | None, messages: Sequence[MessageRow]) -> str | None:
        """Return the id of a chat with this system prompt whose oldest messages have the same roles and texts
        as `messages`.
        Soft-deleted chats are not searched. Return None if there is no such chat."""
        if not messages:
            return None
        wanted = [(message.role, message.content) for message in messages]
        rows = self._db.rows(
            "SELECT m.session_id FROM messages m JOIN sessions s ON s.id = m.session_id"
            " WHERE m.parent IS NULL AND m.role = ? AND m.content = ? AND s.system IS ?"
            " AND s.deleted IS NULL",
            *wanted[0],
            system,
        )
        for row in rows:
            known = self._messages.all(row["session_id"])[: len(wanted)]
            if [(message.role, message.content) for message in known] == wanted:
                return str(row["session_id"])
        return None

    def ids(self) -> set[str]:
        """Return the ids of all chats, including empty and soft-deleted chats."""
        return {row["id"] for row in self._db.rows("SELECT id FROM sessions")}

    def exists(self, session_id: str) -> bool:
        """Return True if there is a chat with this full id. The chat can be soft-deleted. Return False if the
        store cannot be read."""
        with suppress(StoreError):
            return self._db.value("SELECT 1 FROM sessions WHERE id = ?", session_id) is not None
        return False

    def _ids_beginning_with(self, beginning: str, where: str) -> list[str]:
        """Return a list with the one chat id that has this beginning, or [] if no id has it. Raises NotFound
        if several ids have this beginning."""
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
        """Change the system prompt. None removes the system prompt."""
        self._set(session_id, "system", system)

    def set_title(self, session_id: str, title: str) -> None:
        self._set(session_id, "title", " ".join(title.split())[:TITLE])

    def pin(self, session_id: str, pinned: bool = True) -> None:
        """Show a chat before the other chats in lists (pinned=True), or in the order of the last changes
        (pinned=False)."""
        self._set(session_id, "pinned", int(pinned))

    def set_folder(self, session_id: str, folder: str) -> None:
        """Show a chat in the group with this name in lists; "": in no group."""
        self._set(session_id, "folder", " ".join(folder.split())[:TITLE])

    def set_summary(self, session_id: str, summary: str | None, to: int | None) -> None:
        """Store a summary. The model reads the summary instead of the messages up to the message `to`. If
        `summary` is None, the model reads the messages again."""
        with self._db.transaction():
            self._set(session_id, "summary", summary)
            self._set(session_id, "summarized_to", to)

    def _set(self, session_id: str, column: str, value: str | float | None) -> None:
        with self._db.transaction():
            self._db.execute(f"UPDATE sessions SET {column} = ? WHERE id = ?", value, session_id)

    # -- soft deletion -------------------------------------------------------------------------------

    def soft_delete(self, session_id: str) -> None:
        """Hide a chat. `restore` shows the chat again; `delete` removes the chat."""
        self._hide(session_id, time.time())

    def restore(self, session_id: str) -> None:
        """Show a hidden chat again. Raises NotFound if `delete` has begun to erase the chat."""
        self._hide(session_id, None)

    def _hide(self, session_id: str, when: float | None) -> None:
        with self._db.transaction():
            self.get(session_id)
            if self._db.value("SELECT deleted FROM sessions WHERE id = ?", session_id) in (ERASING, FILLING):
                raise NotFound(f"chat {session_id!r} is being deleted for good.")
            self._set(session_id, "deleted", when)

    def soft_deleted(self) -> list[SessionRow]:
        """Return the chats that `restore` can show again, the last deleted chat first."""
        rows = self._db.rows(_SELECT + "WHERE s.deleted > ? ORDER BY s.deleted DESC", ERASING)
        return [SessionRow(**row) for row in rows]

    def deletion_times(self) -> dict[str, float]:
        """Return {chat id: time at which the user deleted the chat, in seconds since 1970}. The result has
        the chats that `restore` can bring back."""
        rows = self._db.rows("SELECT id, deleted FROM sessions WHERE deleted > ?", ERASING)
        return {row["id"]: row["deleted"] for row in rows}

    def find_soft_deleted(self, beginning: str) -> str:
        """Return the id of a soft-deleted chat from a unique beginning of the id, or from "last"."""
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
        """Return the ids of the chats that were soft-deleted before a time, and of the chats that a killed
        process has not completely erased or written.

        when: seconds since 1970
        """
        rows = self._db.rows(
            f"SELECT id FROM sessions WHERE deleted < ? AND (deleted != {FILLING} OR updated < ?)",
            when,
            time.time() - _FILLING_SECONDS,
        )
        return [row["id"] for row in rows]

    # -- deletion ------------------------------------------------------------------------------------

    def delete(self, *session_ids: str, seconds: float = math.inf) -> bool:
        """Delete chats and their replies for good. A reply that another chat (a fork) also shows is not
        deleted. Returns True if the deleted words are gone from all files (`Database.truncate_log`).

        If a deleted reply has a rating or a preference, the rating or preference stays, but its note and the
        reply's words and tokens are deleted. The witness log keeps the id and the length of every reply.

        One transaction hides all the chats. After this, many short transactions erase the chats, so other
        processes can write in between. If the process is killed, the next start finds, with
        `soft_deleted_before`, the chats that are not erased yet.

        seconds: the maximum time to remove the words from the search index; if the removal needs more time, a
            later call continues
        """
        with self._db.transaction():
            for session_id in session_ids:
                self.get(session_id)
                self._set(session_id, "deleted", ERASING)
        for session_id in session_ids:
            while self._erase_some(session_id):
                pass
        return self.clean_index(seconds)

    def take_back(self, session_id: str, message_id: int) -> None:
        """Delete a question as `Messages.take_back` does, and commit the deletion."""
        with self._db.transaction():
            self._replies.erase(*self._messages.take_back(session_id, message_id))

    def clean_index(self, seconds: float) -> bool:
        """Continue to remove deleted words from the search index, for about this many seconds. Then empty the
        log, also if the index needs more time. Returns True if the deleted words are gone from all files."""
        is_clean = self._index.clean(seconds)
        return self._db.truncate_log() and is_clean

    def _erase_some(self, session_id: str) -> bool:
        """Commit the deletion of at most _SLICE of the chat's newest messages. If the chat has no messages
        left, delete the chat and return False."""
        began = time.monotonic()
        with self._db.transaction():
            unseen = self._messages.delete_newest(session_id, _SLICE)
            if unseen is None:
                self._db.execute("DELETE FROM sessions WHERE id = ?", session_id)
                return False
            self._replies.erase(*unseen)
        # after a transaction, other processes can write for as long as the transaction took, at most
        # _LONGEST_PAUSE
        time.sleep(min(time.monotonic() - began, _LONGEST_PAUSE))
        return True
