"""This module stores ratings of replies. Each rating made one version of an adapter; the ratings of a batch
made one version together.

A rating is in force if its version is the head (the version in use) or an ancestor of the head. A later
rating of the same reply, if it is in force, replaces the earlier rating. Undo and rollback move the head.
After each move of the head, `enforce` decides again which ratings are in force.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from string import whitespace

import numpy as np

from ..ratings import BAD, FACTS
from .ancestors import ALL_STEPS, WITH_ANCESTORS, enforce, newest_version, steps_to
from .audit_log import Witness
from .database import Database, to_vector
from .messages import RATING


@dataclass(frozen=True)
class RatingRow:
    id: int
    reply_id: str
    rating: str  # "up", "down" or "1" to "5"
    note: str
    weight: float
    version_before: int
    version_after: int
    query: np.ndarray | None  # [D] float32, the pooled hidden state of the question


@dataclass(frozen=True)
class RatedReply:
    """A rating in force, with the reply's tokens (little-endian int32).

    reward: the reward from a preference, -1 to 1; None: the row is a rating, whose reward depends on the
        other ratings
    """

    reply_id: str
    rating: str
    version: int  # the version that the rating made
    prompt_ids: bytes
    sampled_ids: bytes
    logprob: float | None
    thought: int
    reward: float | None = None


# a condition on the rows of `ratings` t: the rating teaches; a bad rating for wrong facts does not teach
TEACHES = (
    f"NOT (t.rating IN {BAD} AND"
    f" trim(substr(t.note, 1, instr(t.note || ':', ':') - 1), '{whitespace}') = '{FACTS}')"
)
# from the rows of `replies` r: the replies that training can use
USABLE = (
    "length(r.sampled_ids) > 0 AND length(r.prompt_ids) > 0"
    " AND (r.features IS NULL OR length(r.features) > 0)"
)
# from the rows of `ratings` t and `replies` r: the ratings in force of an adapter that training can use
_TRAINS = (
    " FROM ratings t JOIN replies r ON r.id = t.reply_id"
    f" WHERE t.fingerprint = ? AND t.adapter = ? AND t.in_force AND {USABLE} AND {TEACHES}"
)


class Ratings:
    """This class reads and writes the table `ratings`. fingerprint and name: a model and one of its
    adapters."""

    def __init__(self, db: Database, witness: Witness):
        self._db, self._witness = db, witness

    def of_chat(self, session_id: str) -> dict[str, str | None]:
        """Return {reply id: rating in force, or None} for the replies on all branches of a chat."""
        rows = self._db.rows(
            f"SELECT m.reply_id, {RATING} FROM messages m WHERE m.session_id = ? AND m.reply_id IS NOT NULL",
            session_id,
        )
        return {reply_id: rating for reply_id, rating in rows}

    def of_adapter(self, name: str, reply_ids: Iterable[str]) -> dict[str, str | None]:
        """Return {reply id: rating} of one adapter. Replies that never had a rating for this adapter are left
        out. The rating is None if no rating of the reply is in force. A copy of an adapter has its own
        ratings. So the copy can keep a rating after the user takes back the same rating of the original
        adapter."""
        rows = self._db.rows(
            "SELECT reply_id, iif(in_force, rating, NULL) FROM ratings WHERE adapter = ?"
            " AND reply_id IN (SELECT value FROM json_each(?)) ORDER BY in_force, id",
            name,
            json.dumps([*reply_ids]),
        )
        return {reply_id: rating for reply_id, rating in rows}

    def add(
        self, fingerprint: str, name: str, version: int, reply_id: str, rating: str, note: str, weight: float
    ) -> None:
        """Add the rating that made a version. The new rating replaces the reply's earlier rating.

        Call inside a transaction.
        """
        self._db.execute(
            "UPDATE ratings INDEXED BY ratings_by_reply SET in_force = 0"
            " WHERE reply_id = ? AND fingerprint = ? AND adapter = ?",
            reply_id,
            fingerprint,
            name,
        )
        id_ = self._db.insert(
            "ratings",
            fingerprint=fingerprint,
            adapter=name,
            version=version,
            reply_id=reply_id,
            rating=rating,
            note=note,
            weight=weight,
            in_force=1,
            created=time.time(),
        )
        self._record(fingerprint, name, id_, version, reply_id, rating, weight)

    def _record(
        self, fingerprint: str, name: str, id_: int, version: int, reply_id: str, rating: str, weight: float
    ) -> None:
        facts = {"id": id_, "reply": reply_id, "rating": rating, "weight": weight}
        self._witness.record("rating", {"model": fingerprint, "adapter": name, "version": version, **facts})

    def enforce(self, fingerprint: str, name: str, head: int) -> None:
        """Mark the ratings that made the head or one of its ancestors as in force, and all other ratings of
        this adapter as not in force. Call inside a transaction."""
        enforce(self._db, "ratings", "reply_id", fingerprint, name, head)

    # -- reading -------------------------------------------------------------------------------------

    def in_force(self, fingerprint: str, name: str) -> list[RatingRow]:
        """Return the ratings in force, oldest first."""
        rows = self._db.rows(
            "SELECT t.id, t.reply_id, t.rating, t.note, t.weight, a.parent AS version_before,"
            " t.version AS version_after, r.query"
            " FROM ratings t JOIN replies r ON r.id = t.reply_id JOIN adapters a"
            " ON a.fingerprint = t.fingerprint AND a.name = t.adapter AND a.version = t.version"
            " WHERE t.fingerprint = ? AND t.adapter = ? AND t.in_force ORDER BY t.id",
            fingerprint,
            name,
        )
        return [RatingRow(**dict(row) | {"query": to_vector(row["query"])}) for row in rows]

    def weights(self, fingerprint: str, name: str) -> list[tuple[int, float]]:
        """Return (version that the rating made, learning weight from -1 to 1) of the ratings in force, oldest
        first."""
        rows = self._db.rows(
            "SELECT version, weight FROM ratings WHERE fingerprint = ? AND adapter = ? AND in_force"
            " ORDER BY id",
            fingerprint,
            name,
        )
        return [(version, weight) for version, weight in rows]

    def labels(self, fingerprint: str, name: str) -> list[tuple[str, str, int]]:
        """Return (reply id, rating, version that the rating made) of the ratings in force, oldest first.
        Ratings that complain about wrong facts are left out, because they do not change the adapter."""
        rows = self._db.rows(
            "SELECT reply_id, rating, version FROM ratings t WHERE fingerprint = ? AND adapter = ?"
            f" AND in_force AND {TEACHES} ORDER BY id",
            fingerprint,
            name,
        )
        return [(row["reply_id"], row["rating"], row["version"]) for row in rows]

    def notes(self, fingerprint: str, name: str) -> list[tuple[str, str, str, int]]:
        """Return (reply id, rating, note, version that the rating made) of the bad ratings in force that have
        a note, oldest first."""
        rows = self._db.rows(
            "SELECT reply_id, rating, note, version FROM ratings WHERE fingerprint = ? AND adapter = ?"
            f" AND in_force AND note != '' AND rating IN {BAD} ORDER BY id",
            fingerprint,
            name,
        )
        return [(row["reply_id"], row["rating"], row["note"], row["version"]) for row in rows]

    def of_reply(self, fingerprint: str, name: str, reply_id: str) -> tuple[str, str, int] | None:
        """Return (rating, note, version that the rating made) of a reply's rating in force, or None."""
        rows = self._db.rows(
            "SELECT rating, note, version FROM ratings INDEXED BY ratings_by_reply"
            " WHERE reply_id = ? AND fingerprint = ? AND adapter = ? AND in_force",
            reply_id,
            fingerprint,
            name,
        )
        return next(((row["rating"], row["note"], row["version"]) for row in rows), None)

    def texts(self, fingerprint: str, name: str) -> list[tuple[str, str, str]]:
        """Return (prompt, reply, rating) of the ratings in force whose replies were not deleted, oldest
        first."""
        rows = self._db.rows(
            "SELECT r.prompt, r.text, t.rating FROM ratings t JOIN replies r ON r.id = t.reply_id"
            " WHERE t.fingerprint = ? AND t.adapter = ? AND t.in_force AND r.prompt != '' ORDER BY t.id",
            fingerprint,
            name,
        )
        return [(row["prompt"], row["text"], row["rating"]) for row in rows]

    def replies(self, fingerprint: str, name: str, limit: int) -> list[RatedReply]:
        """Return the newest ratings in force that change the adapter and whose replies still have their
        tokens, at most `limit` ratings, oldest first."""
        rows = self._db.rows(
            "SELECT r.id AS reply_id, t.rating, t.version, r.prompt_ids, r.sampled_ids, r.thought,"
            f" r.logprob{_TRAINS} ORDER BY t.id DESC LIMIT ?",
            fingerprint,
            name,
            limit,
        )
        return [RatedReply(**row) for row in reversed(rows)]

    def trainable_versions(self, fingerprint: str, name: str) -> list[int]:
        """Return the versions that the ratings of `replies` made, oldest first."""
        rows = self._db.rows(f"SELECT t.version{_TRAINS} ORDER BY t.id", fingerprint, name)
        return [version for (version,) in rows]

    def steps_of_reply(self, fingerprint: str, name: str, head: int, reply_id: str) -> list[tuple[int, int]]:
        """Return (adapter version before, adapter version after) of each rating of this reply that led to the
        version `head`, oldest first."""
        oldest = self._db.value(
            "SELECT min(version) FROM ratings INDEXED BY ratings_by_reply"
            " WHERE reply_id = ? AND fingerprint = ? AND adapter = ?",
            reply_id,
            fingerprint,
            name,
        )
        if oldest is None:
            return []
        rows = self._db.rows(
            WITH_ANCESTORS + "SELECT a.parent, t.version FROM ratings t JOIN adapters a"
            " ON a.fingerprint = t.fingerprint AND a.name = t.adapter AND a.version = t.version"
            " WHERE t.fingerprint = ?1 AND t.adapter = ?2 AND t.reply_id = ?5"
            " AND t.version IN (SELECT version FROM ancestors) ORDER BY t.id",
            fingerprint,
            name,
            head,
            steps_to(oldest, head),
            reply_id,
        )
        return [(row["parent"], row["version"]) for row in rows]

    def count_of(self, fingerprint: str, name: str, version: int) -> int:
        """Return the number of ratings that made a version, in force or not."""
        sql = "SELECT count(*) FROM ratings WHERE fingerprint = ? AND adapter = ? AND version = ?"
        return self._db.value(sql, fingerprint, name, version)

    def last_version(self, fingerprint: str, name: str, head: int) -> int:
        """Return the newest version, among the head and its ancestors, that a rating made; 0 if there is
        none."""
        return newest_version(self._db, "ratings", fingerprint, name, head)

    def first_time(self, fingerprint: str, name: str) -> float | None:
        """Return the time of the oldest rating in force (seconds since 1970)."""
        return self._db.value(
            "SELECT min(created) FROM ratings WHERE fingerprint = ? AND adapter = ? AND in_force",
            fingerprint,
            name,
        )

    # -- whole adapters ------------------------------------------------------------------------------

    def copy(self, fingerprint: str, name: str, new: str, head: int, shift: int) -> None:
        """Copy the ratings that led to `head` to another adapter. Call inside a transaction. shift: as in
        `Versions.copy`"""
        self._db.execute(
            WITH_ANCESTORS + "INSERT INTO ratings (fingerprint, adapter, version, reply_id, rating, note,"
            " weight, in_force, created) SELECT fingerprint, ?5, version + ?6, reply_id, rating, note,"
            " weight, in_force, created FROM ratings WHERE fingerprint = ?1 AND adapter = ?2"
            " AND version IN (SELECT version FROM ancestors) ORDER BY id",
            fingerprint,
            name,
            head,
            ALL_STEPS,
            new,
            shift,
        )
        rows = self._db.rows(
            "SELECT id AS id_, version, reply_id, rating, weight FROM ratings"
            " WHERE fingerprint = ? AND adapter = ?",
            fingerprint,
            new,
        )
        for row in rows:
            self._record(fingerprint, new, **row)

    def delete(self, fingerprint: str, name: str) -> None:
        """Delete all ratings of an adapter. Call inside a transaction."""
        self._db.execute("DELETE FROM ratings WHERE fingerprint = ? AND adapter = ?", fingerprint, name)
