"""Saved chats: made, found again, named, copied, put away."""

import time
import uuid
from dataclasses import dataclass

from ..errors import NotFound
from .messages import MessageRow, Messages

TITLE = 200  # longest, in characters
_COLUMNS = (
    "SELECT s.id, s.title, s.system, s.model,"
    " (SELECT count(*) FROM messages WHERE session_id = s.id), s.updated, s.created FROM sessions s "
)


@dataclass(frozen=True)
class SessionRow:
    id: str
    title: str
    system: str | None
    model: str
    turns: int  # messages, of all branches
    updated: float
    created: float = 0.0


@dataclass(frozen=True)
class Found:
    """A message with all the words that were searched for; `message_id` None: the chat's title has them."""

    session: SessionRow
    message_id: int | None
    role: str
    content: str


class Chats(Messages):
    """Sessions hold messages; an assistant message points at its reply."""

    def new_session(self, model: str, system: str | None = None, title: str = "") -> str:
        session_id, now = uuid.uuid4().hex[:12], time.time()
        with self.transaction():
            self._db.execute(
                "INSERT INTO sessions (id, title, system, model, created, updated) VALUES (?, ?, ?, ?, ?, ?)",
                (session_id, title, system, model, now, now),
            )
        return session_id

    def session(self, session_id: str) -> SessionRow:
        row = self._row(_COLUMNS + "WHERE s.id = ?", session_id)
        if row is None:
            raise NotFound(f"no chat {session_id!r}; `ruvmlx sessions ls` lists them.")
        return SessionRow(*row)

    def find_session(self, beginning: str) -> str:
        """The id of a chat, from a unique beginning of it or "last"."""
        if beginning == "last":
            found = [row.id for row in self.sessions()[:1]]
        else:
            found = self._beginning_with(beginning, "deleted IS NULL")
        if not found:
            raise NotFound(f"no chat {beginning!r}; `ruvmlx sessions ls` lists them.")
        return found[0]

    def _beginning_with(self, beginning: str, where: str) -> list[str]:
        """The one id that begins so, or none."""
        found = self._rows(
            f"SELECT id FROM sessions WHERE substr(id, 1, ?1) = ?2 AND {where} LIMIT 2",
            len(beginning),
            beginning,
        )
        if beginning and len(found) > 1:
            raise NotFound(f"{beginning!r} is the beginning of more than one chat's id; give more of it.")
        return [row[0] for row in found if beginning]

    def session_ids(self) -> set[str]:
        """Of all chats, empty ones and those that are put away too."""
        return {row[0] for row in self._rows("SELECT id FROM sessions")}

    def sessions(self) -> list[SessionRow]:
        """Chats with at least one message, the newest first."""
        rows = self._rows(
            _COLUMNS + "WHERE s.deleted IS NULL AND EXISTS"
            " (SELECT 1 FROM messages WHERE session_id = s.id) ORDER BY s.updated DESC"
        )
        return [SessionRow(*row) for row in rows]

    def set_system(self, session_id: str, system: str | None) -> None:
        with self.transaction():
            self._db.execute("UPDATE sessions SET system = ? WHERE id = ?", (system, session_id))

    def set_title(self, session_id: str, title: str) -> None:
        with self.transaction():
            self._db.execute(
                "UPDATE sessions SET title = ? WHERE id = ?", (" ".join(title.split())[:TITLE], session_id)
            )

    def fork_session(self, session_id: str, after: int | None = None) -> str:
        """A new chat with the conversation up to a message (None: all of it). Replies stay what they are:
        both chats show their ratings."""
        old, path = self.session(session_id), self.messages(session_id)
        ids = [message.id for message in path]
        if after is not None and after not in ids:
            raise NotFound(f"message {after} is not in the conversation.")
        kept = path[: ids.index(after) + 1] if after is not None else path
        new = self.new_session(old.model, old.system, f"{old.title} (fork)"[:TITLE])
        self.add_tree(new, kept, kept[-1].id if kept else None)
        return new

    def add_tree(self, session_id: str, messages: list[MessageRow], head: int | None) -> None:
        """Put messages into a chat without any. Their ids are only names; parents come before children."""
        new: dict[int | None, int | None] = {None: None}
        with self.transaction():
            for message in messages:
                row = self._db.execute(
                    "INSERT INTO messages (session_id, role, content, reply_id, created, parent)"
                    " VALUES (?, ?, ?, ?, ?, ?) RETURNING id",
                    (session_id, message.role, message.content, message.reply_id,
                     message.created or time.time(), new[message.parent]),
                ).fetchone()  # fmt: skip
                new[message.id] = row[0]
            self._db.execute(
                "UPDATE sessions SET head = ?, updated = ? WHERE id = ?", (new[head], time.time(), session_id)
            )

    # -- put away, to be deleted later ---------------------------------------------------------------

    def put_away(self, session_id: str) -> None:
        """Out of sight; `bring_back` undoes it until `delete_session` has come for it."""
        self.session(session_id)
        self._mark(session_id, time.time())

    def bring_back(self, session_id: str) -> None:
        self.session(session_id)
        self._mark(session_id, None)

    def _mark(self, session_id: str, deleted: float | None) -> None:
        with self.transaction():
            self._db.execute("UPDATE sessions SET deleted = ? WHERE id = ?", (deleted, session_id))

    def put_away_sessions(self) -> list[SessionRow]:
        """What `bring_back` can bring back, what was put away last first."""
        rows = self._rows(_COLUMNS + "WHERE s.deleted IS NOT NULL ORDER BY s.deleted DESC")
        return [SessionRow(*row) for row in rows]

    def find_put_away(self, beginning: str) -> str:
        """The id of one of them, from a unique beginning of it or "last"."""
        if beginning == "last":
            found = [row.id for row in self.put_away_sessions()[:1]]
        else:
            found = self._beginning_with(beginning, "deleted IS NOT NULL")
        if not found:
            raise NotFound(
                f"no deleted chat {beginning!r}; `ruvmlx sessions restore` lists what can come back."
            )
        return found[0]

    def put_away_before(self, when: float) -> list[str]:
        """Ids of the chats that were put away before a time (seconds since 1970)."""
        return [row[0] for row in self._rows("SELECT id FROM sessions WHERE deleted < ?", when)]

    # -- found again ---------------------------------------------------------------------------------

    def search(self, words: str, limit: int = 100) -> list[Found]:
        """Messages of all branches with every word in them, anywhere, large or small; the newest first.

        The index knows pieces of three characters; shorter words are looked for one message at a time.
        """
        terms = words.split()
        if not terms:
            return []
        return (self._titled(terms) + self._said(terms, limit))[:limit]

    def _said(self, terms: list[str], limit: int) -> list[Found]:
        long = ['"' + term.replace('"', '""') + '"' for term in terms if len(term) >= 3]
        short = [term for term in terms if len(term) < 3]
        where = ["s.deleted IS NULL", *["m.content LIKE ? ESCAPE '\\'" for _ in short]]
        if long:
            where.append("m.id IN (SELECT rowid FROM messages_text WHERE messages_text MATCH ?)")
        rows = self._rows(
            "SELECT m.session_id, m.id, m.role, m.content FROM messages m JOIN sessions s"
            f" ON s.id = m.session_id WHERE {' AND '.join(where)} ORDER BY m.id DESC LIMIT ?",
            *map(_like, short),
            *([" AND ".join(long)] if long else []),
            limit,
        )
        sessions = {row.id: row for row in self.sessions()}
        return [Found(sessions[s], id_, role, content) for s, id_, role, content in rows if s in sessions]

    def _titled(self, terms: list[str]) -> list[Found]:
        rows = self._rows(
            "SELECT id FROM sessions s WHERE deleted IS NULL"
            + " AND title || ' ' || coalesce(system, '') LIKE ? ESCAPE '\\'" * len(terms),
            *map(_like, terms),
        )
        ids = {row[0] for row in rows}
        return [Found(s, None, "title", s.title) for s in self.sessions() if s.id in ids]

    def said(self, limit: int = 200) -> list[str]:
        """What the user wrote last, in all chats, each text once; the newest first."""
        rows = self._rows(
            "SELECT m.content FROM messages m JOIN sessions s ON s.id = m.session_id"
            " WHERE m.role = 'user' AND s.deleted IS NULL GROUP BY m.content ORDER BY max(m.id) DESC LIMIT ?",
            limit,
        )
        return [row[0] for row in rows]


def _like(term: str) -> str:
    for special in "\\%_":
        term = term.replace(special, "\\" + special)
    return f"%{term}%"
