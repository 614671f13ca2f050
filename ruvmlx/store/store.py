"""The store: one SQLite file, durable at every commit.

WAL with synchronous=FULL (and F_FULLFSYNC on macOS): when a call that writes has returned, the data is on
the disk. A rating and the adapter version that it made are one transaction, so that neither can be
found without the other.
"""

import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import NotFound, StoreBusy, StoreError
from .schema import migrate

KEEP_TRACES = 50  # newest replies whose trace is kept; older ones are replayed from their tokens
KEEP_VERSIONS = 64  # adapter versions that undo and rollback can reach
_BUSY_SECONDS = 5.0


@dataclass(frozen=True)
class ReplyRow:
    """One generated reply. sampled_ids holds every token drawn, the end-of-reply token too."""

    id: str
    model: str
    fingerprint: str
    adapter: str | None
    adapter_version: int
    prompt_ids: list[int]
    sampled_ids: list[int]
    prompt: str  # the user's words that it answers
    text: str
    finish_reason: str
    query: np.ndarray | None  # [D] float32, embedding of the prompt


@dataclass(frozen=True)
class AdapterRow:
    """One version of an adapter. Version 0 is the untouched model and has no row."""

    version: int
    parent: int
    state: bytes
    kl: float
    norm: float


@dataclass(frozen=True)
class RatingRow:
    id: int
    reply_id: str
    rating: str
    note: str
    weight: float
    version_before: int
    version_after: int
    query: np.ndarray | None
    replaces: int | None = None  # the rating of the same reply that this one took the place of


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


class Store:
    """Everything that outlives the process. Use it from the thread that opened it."""

    def __init__(self, path: Path):
        self.path = path
        with _told_plainly(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            if sys.platform == "darwin":
                self._db.execute("PRAGMA fullfsync = ON")
                self._db.execute("PRAGMA checkpoint_fullfsync = ON")
            migrate(self._db)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; holds the write lock from the first line."""
        with _told_plainly(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def integrity(self) -> str:
        """SQLite's own check: "ok", or what is wrong."""
        with _told_plainly(self.path):
            return str(self._db.execute("PRAGMA quick_check").fetchone()[0])

    def _rows(self, sql: str, *args) -> list[tuple]:
        with _told_plainly(self.path):
            return self._db.execute(sql, args).fetchall()

    def _row(self, sql: str, *args) -> tuple | None:
        rows = self._rows(sql, *args)
        return rows[0] if rows else None

    # -- chats ---------------------------------------------------------------------------------------

    def new_session(self, model: str, system: str | None = None) -> str:
        session_id, now = uuid.uuid4().hex[:12], time.time()
        with self.transaction():
            self._db.execute(
                "INSERT INTO sessions VALUES (?, '', ?, ?, ?, ?)", (session_id, system, model, now, now)
            )
        return session_id

    def session(self, session_id: str) -> SessionRow:
        row = self._row(
            "SELECT id, title, system, model, (SELECT count(*) FROM messages WHERE session_id = s.id), updated"
            " FROM sessions s WHERE id = ?",
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

    def delete_session(self, session_id: str) -> None:
        self.session(session_id)
        with self.transaction():
            self._db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    def messages(self, session_id: str) -> list[MessageRow]:
        return [
            MessageRow(*row)
            for row in self._rows(
                "SELECT m.role, m.content, m.reply_id,"
                " (SELECT rating FROM ratings WHERE reply_id = m.reply_id AND NOT taken_back"
                "  ORDER BY id DESC LIMIT 1), r.finish_reason"
                " FROM messages m LEFT JOIN replies r ON r.id = m.reply_id WHERE m.session_id = ? ORDER BY m.id",
                session_id,
            )
        ]

    def add_user_message(self, session_id: str, content: str) -> None:
        now = time.time()
        title = " ".join(content.split())[:60]
        with self.transaction():
            self._add_message(session_id, "user", content, None, now)
            self._db.execute(
                "UPDATE sessions SET updated = ?, title = CASE title WHEN '' THEN ? ELSE title END WHERE id = ?",
                (now, title, session_id),
            )

    def _add_message(self, session_id: str, role: str, content: str, reply_id: str | None, now: float):
        self._db.execute(
            "INSERT INTO messages (session_id, role, content, reply_id, created) VALUES (?, ?, ?, ?, ?)",
            (session_id, role, content, reply_id, now),
        )

    # -- replies and traces --------------------------------------------------------------------------

    def add_reply(self, reply: ReplyRow, session_id: str | None) -> None:
        """Commit a reply and, for a chat, its message."""
        now = time.time()
        with self.transaction():
            self._db.execute(
                "INSERT INTO replies VALUES (?, (SELECT coalesce(max(seq), 0) + 1 FROM replies),"
                " ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    reply.id,
                    reply.model,
                    reply.fingerprint,
                    reply.adapter,
                    reply.adapter_version,
                    _ids_to_blob(reply.prompt_ids),
                    _ids_to_blob(reply.sampled_ids),
                    reply.prompt,
                    reply.text,
                    reply.finish_reason,
                    None if reply.query is None else reply.query.astype("<f4").tobytes(),
                    now,
                ),
            )
            if session_id is not None:
                self._add_message(session_id, "assistant", reply.text, reply.id, now)
                self._db.execute("UPDATE sessions SET updated = ? WHERE id = ?", (now, session_id))

    def reply(self, reply_id: str) -> ReplyRow:
        """`reply_id` may be "last" or a unique beginning of an id."""
        columns = (
            "SELECT id, model, fingerprint, adapter, adapter_version, prompt_ids, sampled_ids, prompt, text,"
            " finish_reason, query FROM replies "
        )
        if reply_id == "last":
            rows = self._rows(columns + "ORDER BY seq DESC LIMIT 1")
        else:
            rows = self._rows(columns + "WHERE substr(id, 1, ?) = ? LIMIT 2", len(reply_id), reply_id)
        if not rows and reply_id == "last":
            raise NotFound("there is no reply to rate yet; `ruvmlx chat` or `ruvmlx generate` makes one.")
        if not rows or not reply_id:
            raise NotFound(f"no reply {reply_id!r} to rate; `ruvmlx generate --json` prints a reply_id.")
        if len(rows) > 1:
            raise NotFound(f"{reply_id!r} is the beginning of more than one reply id; give more of it.")
        row = rows[0]
        return ReplyRow(*row[:5], _blob_to_ids(row[5]), _blob_to_ids(row[6]), *row[7:10], _vector(row[10]))

    def put_trace(self, reply_id: str, data: bytes) -> None:
        """Keep a reply's trace; the oldest beyond KEEP_TRACES go."""
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO traces SELECT id, seq, ? FROM replies WHERE id = ?", (data, reply_id)
            )
            self._db.execute(
                "DELETE FROM traces WHERE seq <= (SELECT seq FROM traces ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                (KEEP_TRACES,),
            )

    def trace(self, reply_id: str) -> bytes | None:
        row = self._row("SELECT data FROM traces WHERE reply_id = ?", reply_id)
        return row[0] if row else None

    # -- adapters and ratings ------------------------------------------------------------------------

    def adapter_version(self, fingerprint: str, name: str) -> int:
        """The version in use; 0 is the untouched model."""
        row = self._row(
            "SELECT version FROM adapter_heads WHERE fingerprint = ? AND name = ?", fingerprint, name
        )
        return row[0] if row else 0

    def adapter(self, fingerprint: str, name: str, version: int) -> AdapterRow:
        row = self._row(
            "SELECT version, parent, state, kl, norm FROM adapters"
            " WHERE fingerprint = ? AND name = ? AND version = ?",
            fingerprint,
            name,
            version,
        )
        if row is None:
            raise NotFound(
                f"adapter {name!r} has no version {version} any more (the last {KEEP_VERSIONS} are kept); "
                "`ruvmlx learn status` lists what there is."
            )
        return AdapterRow(*row)

    def adapter_versions(self, fingerprint: str, name: str) -> list[int]:
        """Versions that rollback can reach, the oldest first."""
        return [
            row[0]
            for row in self._rows(
                "SELECT version FROM adapters WHERE fingerprint = ? AND name = ? ORDER BY version",
                fingerprint,
                name,
            )
        ]

    def next_version(self, fingerprint: str, name: str) -> int:
        """A number never used before, so that an undone version is not mistaken for a new one."""
        row = self._row(
            "SELECT max(v) FROM (SELECT version AS v FROM adapters WHERE fingerprint = ?1 AND name = ?2"
            " UNION ALL SELECT version_after FROM ratings WHERE fingerprint = ?1 AND adapter = ?2"
            " UNION ALL SELECT version FROM adapter_heads WHERE fingerprint = ?1 AND name = ?2)",
            fingerprint,
            name,
        )
        return (row[0] if row and row[0] is not None else 0) + 1

    def put_adapter(self, fingerprint: str, name: str, row: AdapterRow) -> None:
        """Add a version and make it the one in use. Call inside a transaction."""
        self._db.execute(
            "INSERT INTO adapters VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (fingerprint, name, row.version, row.parent, row.state, row.kl, row.norm, time.time()),
        )
        self.point_adapter(fingerprint, name, row.version)
        self._db.execute(
            "DELETE FROM adapters WHERE fingerprint = ? AND name = ? AND version <= ?",
            (fingerprint, name, row.version - KEEP_VERSIONS),
        )

    def point_adapter(self, fingerprint: str, name: str, version: int) -> None:
        """Make an existing version the one in use. Call inside a transaction."""
        self._db.execute("INSERT OR REPLACE INTO adapter_heads VALUES (?, ?, ?)", (fingerprint, name, version))

    def add_rating(self, reply: ReplyRow, adapter: str, row: RatingRow, version_after: int) -> None:
        """Call inside a transaction."""
        self._db.execute(
            "INSERT INTO ratings (reply_id, rating, note, fingerprint, adapter, weight, version_before,"
            " version_after, replaces, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                reply.id,
                row.rating,
                row.note,
                reply.fingerprint,
                adapter,
                row.weight,
                row.version_before,
                version_after,
                row.replaces,
                time.time(),
            ),
        )
        self._db.execute("UPDATE ratings SET taken_back = 1 WHERE id = ?", (row.replaces,))

    def take_back(self, row: RatingRow) -> None:
        """A rating no longer counts; the one that it replaced does again. Call inside a transaction."""
        self._db.execute("UPDATE ratings SET taken_back = 1 WHERE id = ?", (row.id,))
        self._db.execute("UPDATE ratings SET taken_back = 0 WHERE id = ?", (row.replaces,))

    def keep_ratings_of(self, fingerprint: str, adapter: str, version: int) -> None:
        """Only the ratings that led to a version count from now on. Call inside a transaction."""
        rows = self._db.execute(
            "SELECT id, version_before, version_after, replaces FROM ratings"
            " WHERE fingerprint = ? AND adapter = ? ORDER BY id DESC",
            (fingerprint, adapter),
        ).fetchall()
        chain, replaced = {version}, set()
        for rating_id, before, after, replaces in rows:
            counts = after in chain and rating_id not in replaced and (after != 0 or before != 0)
            if after in chain:
                chain.add(before)
                replaced.add(replaces)
            self._db.execute("UPDATE ratings SET taken_back = ? WHERE id = ?", (not counts, rating_id))

    def ratings(self, fingerprint: str, adapter: str) -> list[RatingRow]:
        """Ratings in force, the oldest first."""
        rows = self._rows(
            "SELECT t.id, t.reply_id, t.rating, t.note, t.weight, t.version_before, t.version_after, r.query,"
            " t.replaces"
            " FROM ratings t JOIN replies r ON r.id = t.reply_id"
            " WHERE t.fingerprint = ? AND t.adapter = ? AND NOT t.taken_back ORDER BY t.id",
            fingerprint,
            adapter,
        )
        return [
            RatingRow(*row[:7], _vector(row[7]), row[8])
            for row in rows
        ]

    def rated_texts(self, fingerprint: str, adapter: str) -> list[tuple[str, str, str]]:
        """(prompt, reply, rating) of every rating in force."""
        return self._rows(
            "SELECT r.prompt, r.text, t.rating FROM ratings t JOIN replies r ON r.id = t.reply_id"
            " WHERE t.fingerprint = ? AND t.adapter = ? AND NOT t.taken_back ORDER BY t.id",
            fingerprint,
            adapter,
        )

    # -- neutral contexts ----------------------------------------------------------------------------

    def neutral(self, fingerprint: str) -> bytes | None:
        row = self._row("SELECT data FROM neutral WHERE fingerprint = ?", fingerprint)
        return row[0] if row else None

    def put_neutral(self, fingerprint: str, data: bytes) -> None:
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO neutral VALUES (?, ?)", (fingerprint, data))


@contextmanager
def _told_plainly(path: Path) -> Iterator[None]:
    """Turn what SQLite and the file system say into one line for people."""
    try:
        yield
    except sqlite3.OperationalError as e:
        if "locked" in str(e) or "busy" in str(e):
            raise StoreBusy(
                f"{path} has been locked by another process for {_BUSY_SECONDS:.0f} s; try again."
            ) from e
        raise StoreError(
            f"cannot write {path}: {e}. Check the disk and its permissions, or set RUVMLX_HOME."
        ) from e
    except sqlite3.DatabaseError as e:
        raise StoreError(
            f"{path} is damaged: {e}. Move it away to start afresh; keep it if you want to recover chats."
        ) from e
    except OSError as e:
        raise StoreError(
            f"cannot use {path.parent}: {e.strerror}. Set RUVMLX_HOME to a folder you can write."
        ) from e


def _ids_to_blob(ids: list[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _blob_to_ids(blob: bytes) -> list[int]:
    return np.frombuffer(blob, "<i4").tolist()


def _vector(blob: bytes | None) -> np.ndarray | None:
    return None if blob is None else np.frombuffer(blob, "<f4")
