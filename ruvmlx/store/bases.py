"""Base adapters that versions stand on, attempts to make a new one, and a training that was stopped.

A base is written once; the versions that ratings make on it refer to it by its id. Id 0 is no base.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import NotFound
from .replies import Replies
from .witness import digest

WRITTEN = 4 << 20  # bytes at a time


@dataclass(frozen=True)
class Attempt:
    """One consolidation. version: the one that it made; None, when it was refused. report: its findings."""

    parent: int
    version: int | None
    report: dict[str, Any]


@dataclass(frozen=True)
class RatedReply:
    """A rating in force and the tokens that it is about."""

    reply_id: str
    rating: str
    version: int  # that the rating made
    prompt_ids: bytes
    sampled_ids: bytes
    query: bytes | None
    logprob: float | None


class Bases(Replies):
    """Bases of each named adapter of a model."""

    def base(self, fingerprint: str, name: str, id_: int) -> bytes:
        """A BaseLoRA as bytes."""
        row = self._row(
            "SELECT state FROM bases WHERE fingerprint = ? AND name = ? AND id = ?", fingerprint, name, id_
        )
        if row is None or row[0] is None:
            raise NotFound(
                f"base {id_} of adapter {name!r} is no longer kept; `ruvmlx learn status` says what is."
            )
        return row[0]

    def add_base(self, fingerprint: str, name: str, state: bytes, report: dict[str, Any]) -> int:
        """Its id, which was never used before. Call inside a transaction."""
        newest = self._row(
            "SELECT coalesce(max(id), 0) FROM bases WHERE fingerprint = ? AND name = ?", fingerprint, name
        )
        id_ = int(newest[0] if newest else 0) + 1
        self._db.execute(
            "INSERT INTO bases VALUES (?, ?, ?, ?, ?, ?)",
            (fingerprint, name, id_, state, json.dumps(report), time.time()),
        )
        self.record("base", {"model": fingerprint, "adapter": name, "id": id_, "state": digest(state)})
        return id_

    def _forget_old_bases(self, fingerprint: str, name: str) -> None:
        """Keep those on which a version stands whose weights are kept, or that an anchor is at."""
        self._db.execute(
            "UPDATE bases SET state = NULL WHERE fingerprint = ?1 AND name = ?2 AND state IS NOT NULL"
            " AND id NOT IN (SELECT base FROM adapters WHERE fingerprint = ?1 AND name = ?2"
            " AND state IS NOT NULL)"
            " AND id NOT IN (SELECT base FROM anchors WHERE fingerprint = ?1 AND name = ?2)",
            (fingerprint, name),
        )

    # -- attempts ------------------------------------------------------------------------------------

    def add_attempt(
        self, fingerprint: str, name: str, parent: int, version: int | None, report: dict[str, Any]
    ) -> None:
        """What a consolidation found, and where it led. Call inside a transaction."""
        self._db.execute(
            "INSERT INTO attempts (fingerprint, name, parent, version, report, created)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (fingerprint, name, parent, version, json.dumps(report), time.time()),
        )
        self.record(
            "consolidation",
            {"model": fingerprint, "adapter": name, "parent": parent, "version": version},
        )

    def attempts(self, fingerprint: str, name: str) -> list[Attempt]:
        """The oldest first."""
        rows = self._rows(
            "SELECT parent, version, report FROM attempts WHERE fingerprint = ? AND name = ? ORDER BY id",
            fingerprint,
            name,
        )
        return [Attempt(parent, version, json.loads(report)) for parent, version, report in rows]

    # -- a training that was stopped --------------------------------------------------------------------

    def training(self, fingerprint: str, name: str) -> bytes | None:
        row = self._row("SELECT state FROM trainings WHERE fingerprint = ? AND name = ?", fingerprint, name)
        return row[0] if row else None

    def has_training(self, fingerprint: str, name: str) -> bool:
        sql = "SELECT 1 FROM trainings WHERE fingerprint = ? AND name = ?"
        return self._row(sql, fingerprint, name) is not None

    def put_training(
        self, fingerprint: str, name: str, state: bytes | None, pause: Callable[[], None] = lambda: None
    ) -> None:
        """Keep where a training stands, in place of what was kept before; None: nothing.

        `pause` is called after every few megabytes and may raise to leave: what was kept before is, still.
        """
        with self.transaction():
            self._db.execute("DELETE FROM trainings WHERE fingerprint = ? AND name = ?", (fingerprint, name))
            if state is None:
                return
            pause()
            made = self._db.execute(
                "INSERT INTO trainings VALUES (?, ?, zeroblob(?))", (fingerprint, name, len(state))
            )
            pause()
            with self._db.blobopen("trainings", "state", made.lastrowid or 0) as blob:
                for start in range(0, len(state), WRITTEN):
                    blob.write(state[start : start + WRITTEN])
                    pause()

    def rated_replies(self, fingerprint: str, name: str, limit: int) -> list[RatedReply]:
        """The newest ratings in force whose replies still have their tokens, the oldest of them first."""
        rows = self._rows(
            "SELECT r.id, t.rating, t.version, r.prompt_ids, r.sampled_ids, r.query, r.logprob"
            " FROM ratings t JOIN replies r ON r.id = t.reply_id"
            " WHERE t.fingerprint = ? AND t.adapter = ? AND t.in_force AND length(r.sampled_ids) > 0"
            " ORDER BY t.id DESC LIMIT ?",
            fingerprint,
            name,
            limit,
        )
        return [RatedReply(*row) for row in reversed(rows)]
