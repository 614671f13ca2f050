"""What was said in a chat, with its branches."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import NotFound
from .tree import Node, Tree
from .witness import Witness


@dataclass(frozen=True)
class MessageRow:
    role: str
    content: str
    reply_id: str | None
    rating: str | None
    finish_reason: str | None
    id: int = 0
    parent: int | None = None
    created: float = 0.0
    branch: int = 1  # which of `branches` alternatives it is
    branches: int = 1


class Messages(Witness):
    """A chat's messages are a tree (tree.py); sessions.head is the end of the branch in use."""

    def messages(self, session_id: str) -> list[MessageRow]:
        """The conversation: the branch that is in use, from its first message on."""
        rows = {row.id: row for row in self.all_messages(session_id)}
        tree = _tree(rows.values())
        return [_placed(rows[id_], tree) for id_ in tree.path(self._head(session_id))]

    def all_messages(self, session_id: str) -> list[MessageRow]:
        """Those of every branch, the oldest first."""
        return [
            MessageRow(*row)
            for row in self._rows(
                "SELECT m.role, m.content, m.reply_id,"
                " (SELECT rating FROM ratings WHERE reply_id = m.reply_id AND in_force"
                "  ORDER BY id DESC LIMIT 1), r.finish_reason, m.id, m.parent, m.created"
                " FROM messages m LEFT JOIN replies r ON r.id = m.reply_id"
                " WHERE m.session_id = ? ORDER BY m.id",
                session_id,
            )
        ]

    def add_user_message(self, session_id: str, content: str) -> None:
        """The next message of the branch in use; the first one is the chat's title, until it gets another."""
        now = time.time()
        title = " ".join(content.split())[:60]
        with self.transaction():
            self._add_message(session_id, "user", content, None, now)
            self._db.execute(
                "UPDATE sessions SET title = CASE title WHEN '' THEN ? ELSE title END WHERE id = ?",
                (title, session_id),
            )

    def set_head(self, session_id: str, message_id: int | None) -> None:
        """Go on after this message of the chat; None: before the first. What came after it stays a branch."""
        known = "SELECT 1 FROM messages WHERE id = ? AND session_id = ?"
        if message_id is not None and not self._row(known, message_id, session_id):
            raise NotFound(f"no message {message_id} in chat {session_id!r}.")
        with self.transaction():
            self._db.execute("UPDATE sessions SET head = ? WHERE id = ?", (message_id, session_id))

    def flip(self, session_id: str, message_id: int, step: int) -> int:
        """Show an alternative of a message in its place, `step` further on, round and round.

        Returns its id; the branch goes on as it was last added to.
        """
        tree = _tree(self.all_messages(session_id))
        others = tree.alternatives(message_id)
        # A question with replies is none of the alternatives: its reply that is shown is.
        shown = next((id_ for id_ in tree.path(self._head(session_id)) if id_ in others), others[0])
        at = others.index(message_id if message_id in others else shown)
        chosen = others[(at + step) % len(others)]
        self.set_head(session_id, tree.newest_leaf(chosen))
        return chosen

    def _head(self, session_id: str) -> int | None:
        row = self._row("SELECT head FROM sessions WHERE id = ?", session_id)
        return row[0] if row else None

    def _add_message(self, session_id: str, role: str, content: str, reply_id: str | None, now: float):
        """Put a message after the head, and make it the head."""
        self._db.execute(
            "INSERT INTO messages (session_id, role, content, reply_id, created, parent)"
            " SELECT id, ?, ?, ?, ?, head FROM sessions WHERE id = ?",
            (role, content, reply_id, now, session_id),
        )
        self._db.execute(
            # Who writes in a chat that another process put away wants it back.
            "UPDATE sessions SET head = (SELECT max(id) FROM messages), updated = ?, deleted = NULL"
            " WHERE id = ?",
            (now, session_id),
        )


def _tree(rows: Iterable[MessageRow]) -> Tree:
    return Tree([Node(row.id, row.parent, row.role) for row in rows])


def _placed(row: MessageRow, tree: Tree) -> MessageRow:
    others = tree.alternatives(row.id)
    if row.id not in others:
        return row
    return replace(row, branch=others.index(row.id) + 1, branches=len(others))
