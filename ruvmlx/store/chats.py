"""Saved chats and their messages."""

import time
import uuid
from dataclasses import dataclass

from ..errors import NotFound
from .witness import Witness


@dataclass(frozen=True)
class SessionRow:
    id: str
    title: str
    system: str | None
    model: str
    turns: int
    updated: float


@dataclass(frozen=True)
class MessageRow:
    role: str
    content: str
    reply_id: str | None
    rating: str | None
    finish_reason: str | None


class Chats(Witness):
    """Sessions hold messages; an assistant message points at its reply."""

    def new_session(self, model: str, system: str | None = None) -> str:
        session_id, now = uuid.uuid4().hex[:12], time.time()
        with self.transaction():
            self._db.execute(
                "INSERT INTO sessions VALUES (?, '', ?, ?, ?, ?)", (session_id, system, model, now, now)
            )
        return session_id

    def session(self, session_id: str) -> SessionRow:
        row = self._row(
            "SELECT id, title, system, model,"
            " (SELECT count(*) FROM messages WHERE session_id = s.id), updated FROM sessions s WHERE id = ?",
            session_id,
        )
        if row is None:
            raise NotFound(f"no chat {session_id!r}; `ruvmlx sessions ls` lists them.")
        return SessionRow(*row)

    def sessions(self) -> list[SessionRow]:
        """Chats with at least one message, the newest first."""
        return [
            SessionRow(*row)
            for row in self._rows(
                "SELECT s.id, s.title, s.system, s.model, count(m.id), s.updated FROM sessions s"
                " JOIN messages m ON m.session_id = s.id GROUP BY s.id ORDER BY s.updated DESC"
            )
        ]

    def set_system(self, session_id: str, system: str | None) -> None:
        with self.transaction():
            self._db.execute("UPDATE sessions SET system = ? WHERE id = ?", (system, session_id))

    def messages(self, session_id: str) -> list[MessageRow]:
        return [
            MessageRow(*row)
            for row in self._rows(
                "SELECT m.role, m.content, m.reply_id,"
                " (SELECT rating FROM ratings WHERE reply_id = m.reply_id AND in_force"
                "  ORDER BY id DESC LIMIT 1), r.finish_reason"
                " FROM messages m LEFT JOIN replies r ON r.id = m.reply_id"
                " WHERE m.session_id = ? ORDER BY m.id",
                session_id,
            )
        ]

    def add_user_message(self, session_id: str, content: str) -> None:
        now = time.time()
        title = " ".join(content.split())[:60]
        with self.transaction():
            self._add_message(session_id, "user", content, None, now)
            self._db.execute(
                "UPDATE sessions SET updated = ?, title = CASE title WHEN '' THEN ? ELSE title END"
                " WHERE id = ?",
                (now, title, session_id),
            )

    def _add_message(self, session_id: str, role: str, content: str, reply_id: str | None, now: float):
        self._db.execute(
            "INSERT INTO messages (session_id, role, content, reply_id, created) VALUES (?, ?, ?, ?, ?)",
            (session_id, role, content, reply_id, now),
        )
