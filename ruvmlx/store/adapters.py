"""Adapter versions, and the ratings that led to them.

Versions are a tree: each has a parent, and one rating that made it. The head is the version in use. A rating
is in force when its version is the head or an ancestor of it, and no later one of the same reply is. So undo
and rollback only move the head; nothing has to be remembered about them.

A rating and its version are one transaction: neither can be found without the other.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import NotFound
from .bases import Bases
from .database import vector
from .witness import digest

KEEP_VERSIONS = 64  # ancestors of the head, and newest versions, whose weights are kept

# The head and its ancestors down to version 0.  ?1 fingerprint, ?2 adapter, ?3 head, ?4 steps at most.
_CHAIN = (
    "WITH RECURSIVE chain(version, step) AS (SELECT ?3, 1 UNION ALL"
    " SELECT a.parent, chain.step + 1 FROM chain JOIN adapters a"
    " ON a.fingerprint = ?1 AND a.name = ?2 AND a.version = chain.version"
    " WHERE chain.version > 0 AND chain.step < ?4) "
)
_ALL = 1 << 62


class HeadMoved(Exception):
    """Another process made a version in between: start again from its weights."""


@dataclass(frozen=True)
class AdapterRow:
    """One version of an adapter. Version 0 is the untouched model and has no row."""

    version: int
    parent: int
    base: int  # id of the base that it stands on, 0: none
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
    query: np.ndarray | None  # [D] float32, embedding of the prompt


class Adapters(Bases):
    """Named adapters of a model, each a tree of versions."""

    def adapter_version(self, fingerprint: str, name: str) -> int:
        """The version in use; 0 is the untouched model."""
        row = self._row(
            "SELECT version FROM adapter_heads WHERE fingerprint = ? AND name = ?", fingerprint, name
        )
        return row[0] if row else 0

    def adapter(self, fingerprint: str, name: str, version: int) -> AdapterRow:
        row = self._row(
            "SELECT version, parent, base, state, kl, norm FROM adapters"
            " WHERE fingerprint = ? AND name = ? AND version = ?",
            fingerprint,
            name,
            version,
        )
        if row is None:
            raise NotFound(f"adapter {name!r} has no version {version}; `ruvmlx learn status` lists them.")
        if row[3] is None:
            raise NotFound(
                f"version {version} of adapter {name!r} is no longer kept (about {KEEP_VERSIONS} are); "
                "`ruvmlx learn status` lists them."
            )
        return AdapterRow(*row)

    def adapter_versions(self, fingerprint: str, name: str) -> list[int]:
        """Versions that rollback can reach, the oldest first."""
        rows = self._rows(
            "SELECT version FROM adapters WHERE fingerprint = ? AND name = ? AND state IS NOT NULL"
            " ORDER BY version",
            fingerprint,
            name,
        )
        return [row[0] for row in rows]

    def add_version(
        self,
        fingerprint: str,
        name: str,
        parent: int,
        state: bytes,
        kl: float,
        norm: float,
        base: int | None = None,
    ) -> int:
        """Add a version to the head and make it the head. Call inside a transaction.

        Its number was never used before. base: an id, None is the parent's. HeadMoved, if the head is not
        `parent` any more.
        """
        if self.adapter_version(fingerprint, name) != parent:
            raise HeadMoved
        newest = self._row(
            "SELECT coalesce(max(version), 0) FROM adapters WHERE fingerprint = ? AND name = ?",
            fingerprint,
            name,
        )
        version = int(newest[0] if newest else 0) + 1
        base = self.base_of(fingerprint, name, parent) if base is None else base
        self._db.execute(
            "INSERT INTO adapters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (fingerprint, name, version, parent, base, state, kl, norm, time.time()),
        )
        self._set_head(fingerprint, name, version)
        self._forget_old_states(fingerprint, name, version)
        facts: dict[str, Any] = {"version": version, "parent": parent, "base": base}
        facts |= {"state": digest(state), "kl": kl, "norm": norm}
        self.record("version", {"model": fingerprint, "adapter": name, **facts})
        return version

    def base_of(self, fingerprint: str, name: str, version: int) -> int:
        """Id of the base that a version stands on; known even where its weights are no longer kept."""
        row = self._row(
            "SELECT base FROM adapters WHERE fingerprint = ? AND name = ? AND version = ?",
            fingerprint,
            name,
            version,
        )
        return row[0] if row else 0

    def is_ancestor(self, fingerprint: str, name: str, version: int, head: int) -> bool:
        """Is the version the head, or on the way to it?"""
        sql = _CHAIN + "SELECT 1 FROM chain WHERE version = ?5"
        return self._row(sql, fingerprint, name, head, _ALL, version) is not None

    def last_rating(self, fingerprint: str, name: str, head: int) -> int:
        """The newest version on the way to the head that a rating made; 0: none did."""
        row = self._row(
            _CHAIN + "SELECT max(version) FROM ratings WHERE fingerprint = ?1 AND adapter = ?2"
            " AND version IN (SELECT version FROM chain)",
            fingerprint,
            name,
            head,
            _ALL,
        )
        return (row[0] if row else 0) or 0

    def promotions(self, fingerprint: str, name: str, head: int) -> list[int]:
        """Versions on the way to the head that brought another base with them, the oldest first."""
        rows = self._rows(
            _CHAIN + "SELECT a.version FROM adapters a LEFT JOIN adapters p ON p.fingerprint = a.fingerprint"
            " AND p.name = a.name AND p.version = a.parent WHERE a.fingerprint = ?1 AND a.name = ?2"
            " AND a.version IN (SELECT version FROM chain) AND a.base != coalesce(p.base, 0)"
            " ORDER BY a.version",
            fingerprint,
            name,
            head,
            _ALL,
        )
        return [row[0] for row in rows]

    def _forget_old_states(self, fingerprint: str, name: str, head: int) -> None:
        """Keep the weights of the newest versions and of the head's nearest ancestors."""
        self._db.execute(
            _CHAIN + "UPDATE adapters SET state = NULL WHERE fingerprint = ?1 AND name = ?2"
            " AND state IS NOT NULL AND version <= ?3 - ?4 AND version NOT IN (SELECT version FROM chain)",
            (fingerprint, name, head, KEEP_VERSIONS),
        )
        self._forget_old_bases(fingerprint, name)

    def _set_head(self, fingerprint: str, name: str, version: int) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO adapter_heads VALUES (?, ?, ?)", (fingerprint, name, version)
        )

    def move_head(self, fingerprint: str, name: str, version: int, why: str = "rollback") -> None:
        """Make an existing version (0: none) the head; the ratings that led to it are in force.

        Call inside a transaction.
        """
        if version != 0:
            self.adapter(fingerprint, name, version)
        moved = {"version_before": self.adapter_version(fingerprint, name), "version": version}
        self.record(why, {"model": fingerprint, "adapter": name, **moved})
        self._set_head(fingerprint, name, version)
        mine = (fingerprint, name, version, _ALL)
        self._db.execute(
            "UPDATE ratings SET in_force = 0 WHERE fingerprint = ? AND adapter = ?", (fingerprint, name)
        )
        self._db.execute(
            _CHAIN + "UPDATE ratings SET in_force = 1 WHERE id IN (SELECT max(id) FROM ratings"
            " WHERE fingerprint = ?1 AND adapter = ?2 AND version IN (SELECT version FROM chain)"
            " GROUP BY reply_id)",
            mine,
        )

    def add_rating(
        self, fingerprint: str, name: str, version: int, reply_id: str, rating: str, note: str, weight: float
    ) -> None:
        """The rating that made a version, in place of an earlier one. Call inside a transaction."""
        self._db.execute(
            "UPDATE ratings SET in_force = 0 WHERE fingerprint = ? AND adapter = ? AND reply_id = ?",
            (fingerprint, name, reply_id),
        )
        made = self._db.execute(
            "INSERT INTO ratings (fingerprint, adapter, version, reply_id, rating, note, weight,"
            " in_force, created) VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?)",
            (fingerprint, name, version, reply_id, rating, note, weight, time.time()),
        )
        facts = {"id": made.lastrowid, "reply": reply_id, "rating": rating, "weight": weight}
        self.record("rating", {"model": fingerprint, "adapter": name, "version": version, **facts})

    def ratings(self, fingerprint: str, name: str) -> list[RatingRow]:
        """Ratings in force, the oldest first."""
        rows = self._rows(
            "SELECT t.id, t.reply_id, t.rating, t.note, t.weight, a.parent, t.version, r.query"
            " FROM ratings t JOIN replies r ON r.id = t.reply_id JOIN adapters a"
            " ON a.fingerprint = t.fingerprint AND a.name = t.adapter AND a.version = t.version"
            " WHERE t.fingerprint = ? AND t.adapter = ? AND t.in_force ORDER BY t.id",
            fingerprint,
            name,
        )
        return [replace(RatingRow(*row), query=vector(row[7])) for row in rows]

    def steps_of_reply(self, fingerprint: str, name: str, head: int, reply_id: str) -> list[tuple[int, int]]:
        """(version before, version after) of every rating of a reply, in order, up to the head."""
        rows = self._rows(
            _CHAIN + "SELECT a.parent, t.version FROM ratings t JOIN adapters a"
            " ON a.fingerprint = t.fingerprint AND a.name = t.adapter AND a.version = t.version"
            " WHERE t.fingerprint = ?1 AND t.adapter = ?2 AND t.reply_id = ?5"
            " AND t.version IN (SELECT version FROM chain) ORDER BY t.id",
            fingerprint,
            name,
            head,
            _ALL,
            reply_id,
        )
        return [(before, after) for before, after in rows]

    def rated_texts(self, fingerprint: str, name: str) -> list[tuple[str, str, str]]:
        """(prompt, reply, rating) of every rating in force whose chat was not deleted."""
        return self._rows(
            "SELECT r.prompt, r.text, t.rating FROM ratings t JOIN replies r ON r.id = t.reply_id"
            " WHERE t.fingerprint = ? AND t.adapter = ? AND t.in_force AND r.prompt != '' ORDER BY t.id",
            fingerprint,
            name,
        )

    def neutral(self, fingerprint: str) -> bytes | None:
        row = self._row("SELECT data FROM neutral WHERE fingerprint = ?", fingerprint)
        return row[0] if row else None

    def put_neutral(self, fingerprint: str, data: bytes) -> None:
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO neutral VALUES (?, ?)", (fingerprint, data))
