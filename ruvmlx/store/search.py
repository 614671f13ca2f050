"""This module does full-text search in all chats."""

from dataclasses import dataclass

from .chats import Chats, SessionRow
from .database import Database

_INDEXED = 3  # characters: the minimum length of an indexed word, because the index holds trigrams
_GROUP = 500  # the maximum number of short words in one SQL condition


@dataclass(frozen=True)
class ChatHit:
    """A message that contains all words of a search. message_id: None: the words are in the chat's title or
    in its system prompt. role: then "title"; content: then the title."""

    session: SessionRow
    message_id: int | None
    role: str
    content: str


class Search:
    """This class searches the tables `sessions` and `messages` with the full-text index `messages_text`."""

    def __init__(self, db: Database, chats: Chats):
        self._db, self._chats = db, chats

    def newest(self, words: str, session_id: str | None = None) -> ChatHit | None:
        """Return the newest message that contains every word, in one chat or in all chats. Return None if
        there is no such message."""
        terms = _terms(words)
        found = self._in_messages(terms, 1, self._chats.all(), session_id) if terms else []
        return found[0] if found else None

    def find(self, words: str, limit: int = 100) -> list[ChatHit]:
        """Return the chats whose title or system prompt contains every word, then the messages of every
        branch that contain every word; both newest first.

        A word can be a part of a longer word, in upper or lower case (for words of one or two characters in
        messages, this is true only of the letters A to Z). The index finds words of three or more characters.
        The search compares a shorter word with every message.
        """
        terms = _terms(words)
        if not terms:
            return []
        chats = self._chats.all()
        return (_in_titles(terms, chats) + self._in_messages(terms, limit, chats))[:limit]

    def _in_messages(
        self, terms: list[str], limit: int, shown: list[SessionRow], session_id: str | None = None
    ) -> list[ChatHit]:
        """Return the messages of the chats in `shown` that contain every term. The newest message comes
        first."""
        long = ['"' + term.replace('"', '""') + '"' for term in terms if len(term) >= _INDEXED]
        short = [_like(term) for term in terms if len(term) < _INDEXED]
        where = ["s.deleted IS NULL", *_have_terms(len(short))]
        if long:
            where.append("m.id IN (SELECT rowid FROM messages_text WHERE messages_text MATCH ?)")
        if session_id is not None:
            where.append("m.session_id = ?")
        rows = self._db.rows(
            "SELECT m.session_id, m.id, m.role, m.content FROM messages m JOIN sessions s"
            f" ON s.id = m.session_id WHERE {' AND '.join(where)} ORDER BY m.id DESC LIMIT ?",
            *short,
            *([" AND ".join(long)] if long else []),
            *([] if session_id is None else [session_id]),
            limit,
        )
        chats = {row.id: row for row in shown}
        found = [row for row in rows if row["session_id"] in chats]
        return [ChatHit(chats[r["session_id"]], r["id"], r["role"], r["content"]) for r in found]


def _in_titles(terms: list[str], chats: list[SessionRow]) -> list[ChatHit]:
    """Return the chats whose title or system prompt contains every term."""
    wanted, found = [term.casefold() for term in terms], []
    for chat in chats:
        both = f"{chat.title} {chat.system or ''}".casefold()
        if all(term in both for term in wanted):
            found.append(ChatHit(chat, None, "title", chat.title))
    return found


def _terms(words: str) -> list[str]:
    """Return the words of a search, each word once. NUL ends a text in SQLite, so it counts as a space."""
    return list(dict.fromkeys(words.replace("\0", " ").split()))


def _have_terms(count: int) -> list[str]:
    """Return SQL conditions for messages that contain `count` terms. A condition has at most _GROUP terms,
    because SQLite refuses an expression with a depth of more than 1,000."""
    terms = ["m.content LIKE ? ESCAPE '\\'"] * count
    return [f"({' AND '.join(terms[at : at + _GROUP])})" for at in range(0, count, _GROUP)]


def _like(term: str) -> str:
    """Return a LIKE pattern for texts that contain the term."""
    for special in "\\%_":
        term = term.replace(special, "\\" + special)
    return f"%{term}%"
