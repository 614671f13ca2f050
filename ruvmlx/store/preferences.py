"""This module stores preferences: the user finds one of two replies to one question better. Each preference
made one version of an adapter.

A preference is in force if its version is the head (the version in use) or an ancestor of the head. A later
preference in force between the same two replies replaces the earlier preference.
"""

import time
from dataclasses import dataclass

from .ancestors import ALL_STEPS, WITH_ANCESTORS, enforce, newest_version
from .audit_log import Witness
from .database import Database, columns
from .ratings import USABLE, RatedReply

# this SQL gives the same value for both orders of two replies
_PAIR = "min(better, worse), max(better, worse)"


@dataclass(frozen=True)
class PreferenceRow:
    """One preference.

    better, worse: the ids of the replies
    kind: "compare", "regenerated" or "edit"
    strength: 1 if the user chose a reply when asked, or edited a reply; less than 1 if another action of the
        user implies the choice
    weight: the learning weight of the better reply (0 to 1) minus that of the worse reply (-1 to 0);
        sona/objective.py
    """

    better: str
    worse: str
    kind: str
    strength: float
    weight: float


@dataclass(frozen=True)
class PreferenceLabel:
    """A preference in force, with the version that it made."""

    better: str
    worse: str
    strength: float
    weight: float
    version: int


class Preferences:
    """This class reads and writes the table `preferences`. fingerprint and name: a model and one of its
    adapters."""

    def __init__(self, db: Database, witness: Witness):
        self._db, self._witness = db, witness

    def add(self, fingerprint: str, name: str, version: int, row: PreferenceRow) -> None:
        """Add the preference that made a version. The new preference replaces an earlier preference between
        the same replies.

        Call inside a transaction.
        """
        self._db.execute(
            "UPDATE preferences SET in_force = 0 WHERE fingerprint = ?1 AND adapter = ?2"
            " AND (better, worse) IN (VALUES (?3, ?4), (?4, ?3))",
            fingerprint,
            name,
            row.better,
            row.worse,
        )
        id_ = self._db.insert(
            "preferences",
            fingerprint=fingerprint,
            adapter=name,
            version=version,
            in_force=1,
            created=time.time(),
            **vars(row),
        )
        self._record(fingerprint, name, id_, version, row)

    def _record(self, fingerprint: str, name: str, id_: int, version: int, row: PreferenceRow) -> None:
        facts = {"model": fingerprint, "adapter": name, "version": version, "id": id_}
        self._witness.record("preference", facts | vars(row))

    def enforce(self, fingerprint: str, name: str, head: int) -> None:
        """Mark the preferences that made the head or one of its ancestors as in force, and all other
        preferences of this adapter as not in force. Call inside a transaction."""
        enforce(self._db, "preferences", _PAIR, fingerprint, name, head)

    # -- reading -------------------------------------------------------------------------------------

    def kind(self, fingerprint: str, name: str, version: int) -> str:
        """Return the kind of the preference that made a version."""
        sql = "SELECT kind FROM preferences WHERE fingerprint = ? AND adapter = ? AND version = ?"
        return str(self._db.value(sql, fingerprint, name, version))

    def in_force(self, fingerprint: str, name: str) -> list[PreferenceLabel]:
        """Return the preferences in force, oldest first."""
        rows = self._db.rows(
            f"SELECT {columns(PreferenceLabel)} FROM preferences"
            " WHERE fingerprint = ? AND adapter = ? AND in_force ORDER BY id",
            fingerprint,
            name,
        )
        return [PreferenceLabel(**row) for row in rows]

    def trainable_versions(self, fingerprint: str, name: str) -> list[int]:
        """Return the versions that the preferences in force made, oldest first. Leave out a preference if
        training can use neither of its replies."""
        rows = self._db.rows(
            "SELECT version FROM preferences p WHERE fingerprint = ? AND adapter = ? AND in_force"
            f" AND EXISTS (SELECT 1 FROM replies r WHERE r.id IN (p.better, p.worse) AND {USABLE})"
            " ORDER BY id",
            fingerprint,
            name,
        )
        return [version for (version,) in rows]

    def texts(self, fingerprint: str, name: str) -> list[tuple[str, str, str]]:
        """Return (prompt, better text, worse text) of the preferences in force whose replies were not
        deleted, oldest first."""
        rows = self._db.rows(
            "SELECT b.prompt, b.text AS better, w.text AS worse FROM preferences p"
            " JOIN replies b ON b.id = p.better JOIN replies w ON w.id = p.worse"
            " WHERE p.fingerprint = ? AND p.adapter = ? AND p.in_force AND b.prompt != '' AND w.prompt != ''"
            " ORDER BY p.id",
            fingerprint,
            name,
        )
        return [(row["prompt"], row["better"], row["worse"]) for row in rows]

    def replies(self, fingerprint: str, name: str, limit: int) -> list[RatedReply]:
        """Return, in the form of rated replies, the better and worse replies of the newest preferences in
        force, at most `limit` replies, oldest first.

        A reply of several preferences appears once, with its newest preference. Replies without tokens and
        replies that teach nothing (`ReplyRow.teaches`) are left out. Replies with a rating in force are left
        out too, because a rating says more about one reply.
        """
        rows = self._db.rows(
            "WITH said(id, reply_id, rating, version, reward) AS ("
            " SELECT id, better, 'up', version, strength FROM preferences"
            "  WHERE fingerprint = ?1 AND adapter = ?2 AND in_force UNION ALL"
            " SELECT id, worse, 'down', version, -strength FROM preferences"
            "  WHERE fingerprint = ?1 AND adapter = ?2 AND in_force)"
            " SELECT r.id AS reply_id, s.rating, s.version, r.prompt_ids, r.sampled_ids, r.thought,"
            " r.logprob, s.reward FROM said s JOIN replies r ON r.id = s.reply_id"
            f" WHERE {USABLE}"
            " AND s.id = (SELECT max(id) FROM said WHERE reply_id = s.reply_id)"
            " AND NOT EXISTS (SELECT 1 FROM ratings t WHERE t.reply_id = r.id AND t.fingerprint = ?1"
            " AND t.adapter = ?2 AND t.in_force)"
            " ORDER BY s.id DESC, s.rating LIMIT ?3",
            fingerprint,
            name,
            limit,
        )
        return [RatedReply(**row) for row in reversed(rows)]

    def steps_of_pair(
        self, fingerprint: str, name: str, head: int, one: str, other: str
    ) -> list[tuple[int, int]]:
        """Return (adapter version before, adapter version after) of each preference between two replies that
        led to the version `head`, oldest first."""
        rows = self._db.rows(
            WITH_ANCESTORS + "SELECT a.parent, p.version FROM preferences p JOIN adapters a"
            " ON a.fingerprint = p.fingerprint AND a.name = p.adapter AND a.version = p.version"
            " WHERE p.fingerprint = ?1 AND p.adapter = ?2"
            " AND (p.better, p.worse) IN (VALUES (?5, ?6), (?6, ?5))"
            " AND p.version IN (SELECT version FROM ancestors) ORDER BY p.id",
            fingerprint,
            name,
            head,
            ALL_STEPS,
            one,
            other,
        )
        return [(row["parent"], row["version"]) for row in rows]

    def last_version(self, fingerprint: str, name: str, head: int) -> int:
        """Return the newest version, among the head and its ancestors, that a preference made; 0 if there is
        none."""
        return newest_version(self._db, "preferences", fingerprint, name, head)

    def of_chat(self, session_id: str) -> list[tuple[str, str, str]]:
        """Return (better reply, worse reply, kind) of the preferences in force between replies of a chat.

        The preferences of all adapters are included. Each preference appears once, although a copy of an
        adapter has copies of the preferences.
        """
        shown = "(SELECT reply_id FROM messages WHERE session_id = ?1)"
        rows = self._db.rows(
            "SELECT better, worse, kind FROM preferences WHERE in_force"
            f" AND better IN {shown} AND worse IN {shown}"
            " GROUP BY better, worse, kind ORDER BY min(id)",
            session_id,
        )
        return [(row["better"], row["worse"], row["kind"]) for row in rows]

    # -- whole adapters ------------------------------------------------------------------------------

    def copy(self, fingerprint: str, name: str, new: str, head: int, shift: int) -> None:
        """Copy the preferences that led to `head` to another adapter. Call inside a transaction. shift: as in
        `Versions.copy`"""
        self._db.execute(
            WITH_ANCESTORS + f"INSERT INTO preferences (fingerprint, adapter, version, {_FIELDS}, in_force,"
            f" created) SELECT fingerprint, ?5, version + ?6, {_FIELDS}, in_force, created FROM preferences"
            " WHERE fingerprint = ?1 AND adapter = ?2 AND version IN (SELECT version FROM ancestors)"
            " ORDER BY id",
            fingerprint,
            name,
            head,
            ALL_STEPS,
            new,
            shift,
        )
        rows = self._db.rows(
            f"SELECT id, version, {_FIELDS} FROM preferences WHERE fingerprint = ? AND adapter = ?",
            fingerprint,
            new,
        )
        for id_, version, *facts in rows:
            self._record(fingerprint, new, id_, version, PreferenceRow(*facts))

    def delete(self, fingerprint: str, name: str) -> None:
        """Delete all preferences of an adapter. Call inside a transaction."""
        self._db.execute("DELETE FROM preferences WHERE fingerprint = ? AND adapter = ?", fingerprint, name)


_FIELDS = columns(PreferenceRow)
