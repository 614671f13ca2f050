"""Adapter versions, and the ratings that led to them.

A rating and the adapter version that it made are one transaction, so that neither can be found without
the other.
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from ..errors import NotFound
from .database import vector
from .replies import Replies, ReplyRow

KEEP_VERSIONS = 64  # adapter versions that undo and rollback can reach


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


class Adapters(Replies):
    """Named adapters of a model, each a chain of versions."""

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
        self._db.execute(
            "INSERT OR REPLACE INTO adapter_heads VALUES (?, ?, ?)", (fingerprint, name, version)
        )

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
        return [replace(RatingRow(*row), query=vector(row[7])) for row in rows]

    def rated_texts(self, fingerprint: str, adapter: str) -> list[tuple[str, str, str]]:
        """(prompt, reply, rating) of every rating in force."""
        return self._rows(
            "SELECT r.prompt, r.text, t.rating FROM ratings t JOIN replies r ON r.id = t.reply_id"
            " WHERE t.fingerprint = ? AND t.adapter = ? AND NOT t.taken_back ORDER BY t.id",
            fingerprint,
            adapter,
        )

    def neutral(self, fingerprint: str) -> bytes | None:
        row = self._row("SELECT data FROM neutral WHERE fingerprint = ?", fingerprint)
        return row[0] if row else None

    def put_neutral(self, fingerprint: str, data: bytes) -> None:
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO neutral VALUES (?, ?)", (fingerprint, data))
