"""This module stores the messages of a chat, in all its branches."""

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..errors import NotFound
from .database import Database, to_vector
from .search_index import SearchIndex
from .tree import Tree

ERASING = 0.0  # this value of `sessions.deleted` means that the chat is being erased and cannot be restored
HEAD = -1  # this value in place of a message's id means the last message of the current branch
_READ = 5  # the number of messages that are read for each text that is wanted, because texts repeat
# the rating in force of the reply of a message `m`, as SQL
RATING = "(SELECT rating FROM ratings WHERE reply_id = m.reply_id AND in_force ORDER BY id DESC LIMIT 1)"
_TITLE = 60  # the number of characters of the first message's first line that become the chat's title


@dataclass(frozen=True)
class MessageRow:
    """One message.

    rating, finish_reason: the values of the message's reply; None for a user's message
    created: seconds since 1970
    branch: the position, from 1, of the message among its versions (`Tree.versions`)
    branches: the number of versions, with the message itself
    calls: tool calls as JSON: the calls of a reply, or the call that a tool's result answers; "": no calls
    """

    role: str
    content: str
    reply_id: str | None
    rating: str | None
    finish_reason: str | None
    id: int = 0
    parent: int | None = None
    created: float = 0.0
    branch: int = 1
    branches: int = 1
    calls: str = ""


class MessagePlace(NamedTuple):
    """The place of a message in the tree of its chat."""

    id: int
    parent: int | None
    role: str


@dataclass(frozen=True)
class Question:
    """A user's message, with its hidden state.

    state: [D] float32, the message's pooled hidden state in one model (sona/embedding.py); None: that model
        has not read the message
    """

    message_id: int
    content: str
    state: np.ndarray | None


class Messages:
    """The messages of each chat form a tree (tree.py). `sessions.head` is the last message of the current
    branch."""

    def __init__(self, db: Database, index: SearchIndex):
        self._db, self._index = db, index
        # the arguments, the mark and the result of the last call of `branch`
        self._last_branch: tuple[tuple[str, tuple[int, int]], list[MessageRow]] | None = None

    def branch(self, session_id: str) -> list[MessageRow]:
        """Return the current branch, from its first message to its last. The last result is kept until any
        process writes into the database, because the apps read a long chat again and again."""
        mark = self._db.write_mark()
        if mark is None or self._last_branch is None or self._last_branch[0] != (session_id, mark):
            with self._db.snapshot():
                head, rows = self.head(session_id), {row.id: row for row in self.all(session_id)}
            tree = Tree([*rows.values()])
            found = [_with_branch_number(rows[id_], tree) for id_ in tree.path(head)]
            if mark is None:
                return found
            self._last_branch = (session_id, mark), found
        return list(self._last_branch[1])

    def newest(self, session_id: str, count: int) -> list[MessageRow]:
        """Return the newest `count` messages of the current branch. The method reads the texts of these
        messages alone. It reads the id, the parent and the role of every message of the chat."""
        places = "SELECT id, parent, role FROM messages WHERE session_id = ? ORDER BY id"
        with self._db.snapshot():
            tree = Tree([MessagePlace(*row) for row in self._db.rows(places, session_id)])
            ids = tree.path(self.head(session_id))[-count:]
            rows = self._read("m.id IN (SELECT value FROM json_each(?))", json.dumps(ids))
        of_id = {row.id: row for row in rows}
        return [_with_branch_number(of_id[id_], tree) for id_ in ids]

    def all(self, session_id: str) -> list[MessageRow]:
        """Return the messages of every branch, oldest first. The fields `branch` and `branches` of these
        messages are not set."""
        return self._read("m.session_id = ?", session_id)

    def _read(self, where: str, value: str) -> list[MessageRow]:
        rows = self._db.rows(
            f"SELECT m.role, m.content, m.reply_id, {RATING},"
            " r.finish_reason, m.id, m.parent, m.created, 1, 1, m.calls"
            " FROM messages m LEFT JOIN replies r ON r.id = m.reply_id"
            f" WHERE {where} ORDER BY m.id",
            value,
        )
        return [MessageRow(*row) for row in rows]

    def user_texts(self, limit: int = 200) -> list[str]:
        """Return the newest of the user's messages of all chats, newest first. Equal texts appear once."""
        rows = self._db.rows(
            "SELECT m.content FROM messages m JOIN sessions s ON s.id = m.session_id"
            " WHERE m.role = 'user' AND s.deleted IS NULL ORDER BY m.id DESC LIMIT ?",
            _READ * limit,
        )
        return list(dict.fromkeys(row["content"] for row in rows))[:limit]

    def questions(self, session_id: str, fingerprint: str) -> list[Question]:
        """Return the user's messages of all branches of a chat, newest first, with their pooled hidden states
        in one model."""
        read = self._db.rows(
            "SELECT m.parent, r.prompt, r.query FROM messages m JOIN replies r ON r.id = m.reply_id"
            " WHERE m.session_id = ? AND r.fingerprint = ? AND r.query IS NOT NULL",
            session_id,
            fingerprint,
        )
        states = {(row["parent"], row["prompt"]): row["query"] for row in read}
        rows = self._db.rows(
            "SELECT id, content FROM messages WHERE session_id = ? AND role = 'user' ORDER BY id DESC",
            session_id,
        )
        return [
            Question(row["id"], row["content"], to_vector(states.get((row["id"], row["content"]))))
            for row in rows
        ]

    def first_texts(self, limit: int = 200) -> list[str]:
        """Return the user's messages with which chats begin, newest first; a chat can have several versions
        of its first message. Equal texts appear once."""
        rows = self._db.rows(
            "SELECT m.content FROM messages m JOIN sessions s ON s.id = m.session_id"
            " WHERE m.role = 'user' AND m.parent IS NULL AND s.deleted IS NULL"
            " GROUP BY m.content ORDER BY max(m.id) DESC LIMIT ?",
            limit,
        )
        return [row["content"] for row in rows]

    # -- writing -------------------------------------------------------------------------------------

    def add_user(self, session_id: str, content: str, after: int | None = HEAD) -> int:
        """Add a user's message and return its id. The message becomes the end of the current branch. A chat
        without a title gets its title from this message. Raises NotFound if the chat or the message `after`
        does not exist.

        after: the id of the message before the new message; None: the new message is a first message
        """
        now = time.time()
        # the title is the first line that has text, because the contents of files can follow the question
        line = next((line for line in content.splitlines() if line.strip()), "")
        title = " ".join(line.split())[:_TITLE]
        with self._db.transaction():
            message = self.append(session_id, "user", content, None, now, after)
            self._db.execute("UPDATE sessions SET title = ? WHERE id = ? AND title = ''", title, session_id)
        return message

    def add_result(self, session_id: str, content: str, calls: str, after: int) -> int:
        """Add the result of a tool call after the message `after`. Returns the id of the new message."""
        with self._db.transaction():
            return self.append(session_id, "tool", content, None, time.time(), after, calls)

    def append(
        self,
        session_id: str,
        role: str,
        content: str,
        reply_id: str | None,
        now: float,
        after: int | None = HEAD,
        calls: str = "",
    ) -> int:
        """Add a message after the message `after` (HEAD: after the last message of the current branch; None:
        as a first message), and make the new message the head (the end of the current branch). Returns the
        new message's id. Call inside a transaction. The caller gives `after` if another process could have
        moved the head since the question was read."""
        chat = self._db.row("SELECT head, deleted FROM sessions WHERE id = ?", session_id)
        if chat is None or chat["deleted"] == ERASING:
            raise NotFound(f"the chat {session_id!r} was deleted meanwhile.")
        if after is not None and after != HEAD:
            self._require(session_id, after)
        message = self._db.insert(
            "messages",
            session_id=session_id,
            role=role,
            content=content,
            reply_id=reply_id,
            created=now,
            calls=calls,
            parent=chat["head"] if after == HEAD else after,
        )
        # Writing in a chat that another process has soft-deleted restores the chat.
        self._db.execute(
            "UPDATE sessions SET head = ?, updated = ?, deleted = NULL WHERE id = ?", message, now, session_id
        )
        return message

    def add_tree(
        self,
        session_id: str,
        messages: Iterable[MessageRow],
        head: int | None,
        seconds: float = math.inf,
    ) -> dict[int | None, int | None]:
        """Fill an empty chat with messages. The messages get new ids. Return {old id: new id}.

        messages: the messages; a parent comes before its children

        seconds: the approximate length of one transaction; after each transaction, other processes can use
            the lock for the same time
        """
        new: dict[int | None, int | None] = {None: None}
        rest, is_done = iter(messages), False
        while not is_done:
            with self._db.transaction():
                is_done = self._add_some(session_id, rest, new, seconds)
                self._db.execute(
                    "UPDATE sessions SET head = ?, updated = ? WHERE id = ?",
                    new.get(head),
                    time.time(),
                    session_id,
                )
            if not is_done:
                time.sleep(seconds)
        return new

    def _add_some(
        self, session_id: str, rest: Iterator[MessageRow], new: dict[int | None, int | None], seconds: float
    ) -> bool:
        """Insert messages for about this many seconds. Returns True after the last message. new: {old id: new
        id}."""
        began = time.monotonic()
        for message in rest:
            new[message.id] = self._db.insert(
                "messages",
                session_id=session_id,
                role=message.role,
                content=message.content,
                reply_id=message.reply_id,
                created=message.created or time.time(),
                parent=new[message.parent],
                calls=message.calls,
            )
            if time.monotonic() - began > seconds:
                return False
        return True

    # -- current branch ------------------------------------------------------------------------------

    def set_head(self, session_id: str, message_id: int | None) -> None:
        """Continue the chat after this message (None: from its beginning). Later messages stay as a branch.

        Raises NotFound if the chat has no message with this id.
        """
        if message_id is not None:
            self._require(session_id, message_id)
        with self._db.transaction():
            self._db.execute("UPDATE sessions SET head = ? WHERE id = ?", message_id, session_id)

    def show(self, session_id: str, message_id: int) -> None:
        """Make the branch with this message the current branch. Raises NotFound if
        the chat has no message with this id."""
        self._require(session_id, message_id)
        tree = Tree(self.all(session_id))
        if message_id not in tree.path(self.head(session_id)):
            self.set_head(session_id, tree.newest_leaf(message_id))

    def _require(self, session_id: str, message_id: int) -> None:
        known = "SELECT 1 FROM messages WHERE id = ? AND session_id = ?"
        if not self._db.row(known, message_id, session_id):
            raise NotFound(f"no message {message_id} in chat {session_id!r}.")

    def go_before(self, session_id: str, message_id: int) -> None:
        """Continue the chat before a message: the next message becomes its sibling. Call inside a
        transaction.

        Raises NotFound if the chat has no message with this id.
        """
        self._require(session_id, message_id)
        self._db.execute(
            "UPDATE sessions SET head = (SELECT parent FROM messages WHERE id = ?) WHERE id = ?",
            message_id,
            session_id,
        )

    def place_of(self, reply_id: str) -> tuple[str, int] | None:
        """Return (chat id, message id) of the newest message that shows this reply; None if no chat, or only
        a deleted chat, shows the reply."""
        row = self._db.row(
            "SELECT m.session_id, m.id FROM messages m JOIN sessions s ON s.id = m.session_id"
            " WHERE m.reply_id = ? AND s.deleted IS NULL ORDER BY m.id DESC LIMIT 1",
            reply_id,
        )
        return (row["session_id"], row["id"]) if row else None

    def is_in_deleted_chat(self, reply_id: str) -> bool:
        """Return True if only soft-deleted chats show this reply."""
        rows = self._db.rows(
            "SELECT s.deleted FROM messages m JOIN sessions s ON s.id = m.session_id WHERE m.reply_id = ?",
            reply_id,
        )
        return bool(rows) and all(row["deleted"] is not None for row in rows)

    def next_sibling(self, session_id: str, message_id: int, step: int) -> int:
        """Show another sibling of a message and return its id. The new branch ends with the newest message
        below the sibling.

        step: the number of places to move; after the last sibling comes the first
        """
        tree = Tree(self.all(session_id))
        siblings = tree.siblings(message_id)
        # If a question has replies, its reply on the current branch is among the siblings, not the question
        # itself.
        shown = next((id_ for id_ in tree.path(self.head(session_id)) if id_ in siblings), siblings[0])
        at = siblings.index(message_id if message_id in siblings else shown)
        chosen = siblings[(at + step) % len(siblings)]
        self.set_head(session_id, tree.newest_leaf(chosen))
        return chosen

    def head(self, session_id: str) -> int | None:
        """Return the id of the last message of the current branch; None in an empty chat."""
        return self._db.value("SELECT head FROM sessions WHERE id = ?", session_id)

    # -- deletion ------------------------------------------------------------------------------------

    def take_back(self, session_id: str, message_id: int) -> list[str]:
        """Delete a question without a reply. If the question has empty replies only, delete the question and
        these replies. If the chat then has no messages, also delete the title of the chat. Return the ids of
        the replies that no chat shows any more. The caller must begin the transaction."""
        rows = self._db.rows(
            "SELECT id, parent, content, reply_id FROM messages WHERE session_id = ?1 AND"
            " (id = ?2 OR parent = ?2) ORDER BY id DESC",
            session_id,
            message_id,
        )
        replies = [row for row in rows if row["id"] != message_id]
        later = "SELECT 1 FROM messages WHERE parent IN (SELECT value FROM json_each(?))"
        has_later = self._db.row(later, json.dumps([row["id"] for row in replies])) is not None
        if not rows or has_later or any(row["content"] for row in replies):
            return []
        for row in rows:
            move = "UPDATE sessions SET head = ? WHERE id = ? AND head = ?"
            self._db.execute(move, row["parent"], session_id, row["id"])
        unseen = self._delete(rows)
        self._db.execute(
            "UPDATE sessions SET title = '' WHERE id = ?1"
            " AND NOT EXISTS (SELECT 1 FROM messages WHERE session_id = ?1)",
            session_id,
        )
        return unseen

    def delete_newest(self, session_id: str, count: int) -> list[str] | None:
        """Delete a chat's newest messages, at most `count`. Returns the ids of the replies that no chat shows
        any more, or None if there was no message. Call inside a transaction.

        The newest messages are deleted first. A message that is deleted therefore has no children, and
        SQLite's ON DELETE CASCADE deletes nothing more. SQLite's cascade of deletions fails at 1,000 levels.
        """
        rows = self._db.rows(
            "SELECT id, reply_id FROM messages WHERE session_id = ? ORDER BY id DESC LIMIT ?",
            session_id,
            count,
        )
        return self._delete(rows) if rows else None

    def _delete(self, rows: Sequence[sqlite3.Row]) -> list[str]:
        """Delete messages. Return the ids of their replies that no chat shows any more."""
        for row in rows:
            self._db.execute("DELETE FROM messages WHERE id = ?", row["id"])
        self._index.mark()
        shown = dict.fromkeys(row["reply_id"] for row in rows if row["reply_id"] is not None)
        is_shown = "SELECT 1 FROM messages WHERE reply_id = ?"
        return [id_ for id_ in shown if self._db.row(is_shown, id_) is None]


def _with_branch_number(row: MessageRow, tree: Tree) -> MessageRow:
    """Return the message with `branch` and `branches` (its position and the number of versions) set."""
    versions = tree.versions(row.id)
    if len(versions) == 1:
        return row
    return replace(row, branch=versions.index(row.id) + 1, branches=len(versions))
