"""This module stores versions of adapters.

The versions of an adapter form a tree: each version has a parent. The head is the version in use. Undo and
rollback move the head. A rating and the version that it made are written in one transaction.
"""

import time
from dataclasses import dataclass
from typing import Any

from ..errors import NotFound
from .ancestors import ALL_STEPS, WITH_ANCESTORS, steps_to
from .audit_log import MOVES, LogFilter, Witness, digest
from .bases import Bases
from .database import Database
from .preferences import Preferences
from .ratings import Ratings
from .weights import Weights

# a copy has the weights of KEEP_COPIED versions at most: the copied version and its nearest ancestors
KEEP_COPIED = 8
UNKNOWN_BASE = -1  # the answer of `base_of` for a version that does not exist


class HeadMoved(Exception):
    """This error means that another process moved the head (the version in use) first. Start again from the
    weights of the new head."""


@dataclass(frozen=True)
class VersionRow:
    """One version of an adapter. Version 0 is the model without an adapter and has no row."""

    version: int
    parent: int
    base: int  # the id of its base LoRA; 0: no base LoRA
    state: bytes  # the MicroLoRA
    kl: float  # the KL divergence to the original model, in nats per token of the reference text
    norm: float


class Versions:
    """This class reads and writes the tables `adapters` and `adapter_heads`. Parameters of its methods:
    fingerprint and name: a model and one of its adapters."""

    def __init__(
        self, db: Database, witness: Witness, bases: Bases, ratings: Ratings, preferences: Preferences
    ):
        self._db, self._witness, self._bases = db, witness, bases
        self._ratings, self._preferences = ratings, preferences
        self.weights = Weights(db)

    def head(self, fingerprint: str, name: str) -> int:
        """Return the version in use; 0: the model without an adapter."""
        sql = "SELECT version FROM adapter_heads WHERE fingerprint = ? AND name = ?"
        return self._db.value(sql, fingerprint, name) or 0

    def has_adapter(self, fingerprint: str, name: str) -> bool:
        """Return True if the model has an adapter with this name. Another process can have removed it."""
        sql = "SELECT 1 FROM adapter_heads WHERE fingerprint = ? AND name = ?"
        return self._db.row(sql, fingerprint, name) is not None

    def get(self, fingerprint: str, name: str, version: int) -> VersionRow:
        """Return a version. Raises NotFound if there is no such version or its weights were deleted."""
        facts = None if version.bit_length() > 63 else self._facts(fingerprint, name, version)
        if facts is None:
            raise NotFound(
                f"adapter {name!r} has no version {version}; {self._kept_in_words(fingerprint, name)}."
            )
        state = self.weights.get(fingerprint, name, version)
        if state is None:
            known = self._kept_in_words(fingerprint, name)
            raise NotFound(f"version {version} of adapter {name!r} is no longer kept; {known}.")
        return VersionRow(**facts, state=state)

    def _facts(self, fingerprint: str, name: str, version: int) -> dict[str, Any] | None:
        """Return the parent, the base LoRA's id, the KL divergence and the norm of a version, without its
        weights; None if there is no such version."""
        row = self._db.row(
            "SELECT version, parent, base, kl, norm FROM adapters"
            " WHERE fingerprint = ? AND name = ? AND version = ?",
            fingerprint,
            name,
            version,
        )
        return None if row is None else dict(row)

    def kl_and_norm(self, fingerprint: str, name: str, version: int) -> tuple[float, float]:
        """Return (the KL divergence, the norm) of a version; (0, 0) for the model without an adapter."""
        facts = self._facts(fingerprint, name, version)
        return (facts["kl"], facts["norm"]) if facts else (0.0, 0.0)

    def parent_of(self, fingerprint: str, name: str, version: int) -> int:
        """Return the parent of a version; 0: the parent is the model without an adapter."""
        facts = self._facts(fingerprint, name, version)
        return facts["parent"] if facts else 0

    def _kept_in_words(self, fingerprint: str, name: str) -> str:
        """Return, as text for the user, the versions that rollback accepts."""
        known = self.kept_versions(fingerprint, name)
        if not known:
            return "it has only version 0, the original model"
        if len(known) == 1:
            return f"it has version {known[0]}, and version 0, the original model"
        return f"it has {len(known)} versions, {known[0]} to {known[-1]}, and version 0, the original model"

    def kept_versions(self, fingerprint: str, name: str) -> list[int]:
        """Return the versions that still have their weights, oldest first. Rollback can use these."""
        rows = self._db.rows(
            "SELECT version FROM adapters WHERE fingerprint = ? AND name = ? AND state IS NOT NULL"
            " ORDER BY version",
            fingerprint,
            name,
        )
        return [row["version"] for row in rows]

    def base_of(self, fingerprint: str, name: str, version: int) -> int:
        """Return the id of a version's base LoRA; 0: no base LoRA; UNKNOWN_BASE: there is no such version.
        The id is known even if the weights were deleted."""
        sql = "SELECT base FROM adapters WHERE fingerprint = ? AND name = ? AND version = ?"
        found = self._db.value(sql, fingerprint, name, version) if version else 0
        return UNKNOWN_BASE if found is None else found

    def is_ancestor(self, fingerprint: str, name: str, version: int, head: int) -> bool:
        """Return True if the version is the head or one of its ancestors."""
        sql = WITH_ANCESTORS + "SELECT 1 FROM ancestors WHERE version = ?5"
        return self._db.row(sql, fingerprint, name, head, steps_to(version, head), version) is not None

    def newest(self, fingerprint: str, name: str) -> int:
        """Return the highest version number that was ever used for this adapter name, also by removed
        adapters; 0 if there was no version. Another process can still have a version of a removed adapter in
        memory. So no number is used again."""
        return self._db.value(
            "SELECT max("
            "coalesce((SELECT max(version) FROM adapters WHERE fingerprint = ?1 AND name = ?2), 0),"
            " coalesce((SELECT version FROM removed_adapters WHERE fingerprint = ?1 AND name = ?2), 0))",
            fingerprint,
            name,
        )

    def promotions(self, fingerprint: str, name: str, head: int) -> list[int]:
        """Return the versions with another base LoRA than their parents, among the head and its ancestors,
        oldest first."""
        rows = self._db.rows(
            WITH_ANCESTORS + "SELECT a.version FROM adapters a"
            " LEFT JOIN adapters p ON p.fingerprint = a.fingerprint"
            " AND p.name = a.name AND p.version = a.parent WHERE a.fingerprint = ?1 AND a.name = ?2"
            " AND a.version IN (SELECT version FROM ancestors) AND a.base != coalesce(p.base, 0)"
            " ORDER BY a.version",
            fingerprint,
            name,
            head,
            ALL_STEPS,
        )
        return [row["version"] for row in rows]

    def head_at(self, fingerprint: str, name: str, when: float) -> int:
        """Return the version that was in use at a time, also if the user took it back later; 0: the model
        without an adapter. The witness log knows every version that was put in use.

        The result is the version before the first change at the time `when` or later. If the clock was set
        back, a later change can have an earlier time. A copied adapter has no changes of its own before the
        copy; for such a time, the result is `_newest_before`.

        when: seconds since 1970
        """
        found: int | None = None
        for row in self._witness.walk(LogFilter((*MOVES, "remove"))):
            if (row.body.get("model"), row.body.get("adapter")) != (fingerprint, name):
                continue
            if row.time >= when * 1e9:
                break
            found = None if row.kind == "remove" else int(row.body["version"])
        return self._newest_before(fingerprint, name, when) if found is None else found

    def _newest_before(self, fingerprint: str, name: str, when: float) -> int:
        """Return the version before the first version that was made at the time `when` or later, among the
        head and its ancestors; 0: no version. when: seconds since 1970"""
        found = self._db.value(
            WITH_ANCESTORS + ", line AS (SELECT version, created FROM adapters WHERE fingerprint = ?1"
            " AND name = ?2 AND version IN (SELECT version FROM ancestors))"
            " SELECT max(version) FROM line WHERE version <"
            " coalesce((SELECT min(version) FROM line WHERE created >= ?5), 1 << 62)",
            fingerprint,
            name,
            self.head(fingerprint, name),
            ALL_STEPS,
            when,
        )
        return found or 0

    def nearest_kept(self, fingerprint: str, name: str, version: int) -> int:
        """Return the version, or its newest ancestor, that still has its weights. Return `version` itself if
        none of them has its weights."""
        found = self._db.value(
            WITH_ANCESTORS + "SELECT max(version) FROM adapters WHERE fingerprint = ?1 AND name = ?2"
            " AND state IS NOT NULL AND version IN (SELECT version FROM ancestors)",
            fingerprint,
            name,
            version,
            ALL_STEPS,
        )
        return found or version

    # -- writing -------------------------------------------------------------------------------------

    def add(
        self,
        fingerprint: str,
        name: str,
        parent: int,
        state: bytes,
        kl: float,
        norm: float,
        base: int | None = None,
    ) -> int:
        """Add a version as a child of the head, and make the version the head. Returns its number, which no
        adapter of this name uses again. Call inside a transaction.

        base: the id of a base LoRA; None: the base LoRA of the parent version

        Raises HeadMoved if `parent` is no longer the head.
        """
        if self.head(fingerprint, name) != parent:
            raise HeadMoved
        newest = self.newest(fingerprint, name)
        base = self.base_of(fingerprint, name, parent) if base is None else base
        row = VersionRow(newest + 1, parent, base, state, kl, norm)
        facts = vars(row) | {"state": None}
        self._db.insert("adapters", fingerprint=fingerprint, name=name, created=time.time(), **facts)
        self.weights.write(fingerprint, name, row.version, parent, state)
        self._set_head(fingerprint, name, row.version)
        self._forget_old_weights(fingerprint, name, row.version)
        self._record(fingerprint, name, vars(row))
        return row.version

    def move_head(self, fingerprint: str, name: str, version: int, why: str = "rollback") -> None:
        """Make an existing version (0: no adapter) the head, and mark the ratings and preferences that made
        it or its ancestors as in force.

        Raises NotFound if the version does not exist or its weights were deleted. Call inside a transaction.
        """
        if version != 0:
            self.get(fingerprint, name, version)
        moved = {"version_before": self.head(fingerprint, name), "version": version}
        self._witness.record(why, {"model": fingerprint, "adapter": name, **moved})
        self._set_head(fingerprint, name, version)
        self._ratings.enforce(fingerprint, name, version)
        self._preferences.enforce(fingerprint, name, version)

    def copy(self, fingerprint: str, name: str, new: str, head: int, shift: int) -> None:
        """Copy a version, its ancestors and their base LoRAs to a new adapter. The version becomes the head
        of the new adapter. Call inside a transaction.

        shift: the number to add to the numbers of all versions
        """
        base_shift = self._bases.newest(fingerprint, new)
        self._db.execute(
            WITH_ANCESTORS
            + "INSERT INTO adapters (fingerprint, name, version, parent, base, kl, norm, created)"
            " SELECT a.fingerprint, ?5, a.version + ?6, iif(a.parent > 0, a.parent + ?6, 0),"
            " iif(a.base > 0, a.base + ?7, 0), a.kl, a.norm, a.created FROM ancestors c JOIN adapters a"
            " ON a.fingerprint = ?1 AND a.name = ?2 AND a.version = c.version",
            fingerprint,
            name,
            head,
            ALL_STEPS,
            new,
            shift,
            base_shift,
        )
        self._copy_weights(fingerprint, name, new, head, shift)
        self._bases.copy(fingerprint, name, new, base_shift)
        self._set_head(fingerprint, new, head + shift)

    def _copy_weights(self, fingerprint: str, name: str, new: str, head: int, shift: int) -> None:
        """Copy the weights of a version and of its nearest ancestors. Write the version and all its ancestors
        to the witness log."""
        nearest = self._db.rows(
            WITH_ANCESTORS + "SELECT version FROM ancestors WHERE step <= ?5",
            fingerprint,
            name,
            head,
            ALL_STEPS,
            KEEP_COPIED,
        )
        copied = {row["version"] + shift for row in nearest}
        sql = (
            "SELECT version, parent, base, kl, norm FROM adapters WHERE fingerprint = ? AND name = ?"
            " ORDER BY version"
        )
        for row in map(dict, self._db.rows(sql, fingerprint, new)):
            number = row["version"]
            state = self.weights.get(fingerprint, name, number - shift) if number in copied else None
            if state is not None:
                source = row["parent"] if row["parent"] in copied else 0
                self.weights.write(fingerprint, new, number, source, state)
            self._record(fingerprint, new, row | {"state": state})

    def _record(self, fingerprint: str, name: str, row: dict[str, Any]) -> None:
        facts = {key: row[key] for key in ("version", "parent", "base", "kl", "norm")}
        facts["state"] = digest(row["state"]) if row["state"] is not None else None
        self._witness.record("version", {"model": fingerprint, "adapter": name, **facts})

    def _set_head(self, fingerprint: str, name: str, version: int) -> None:
        self._db.replace("adapter_heads", fingerprint=fingerprint, name=name, version=version)

    def _forget_old_weights(self, fingerprint: str, name: str, head: int) -> None:
        self.weights.pack_plain(fingerprint, name, head)
        if self.weights.delete_old(fingerprint, name, head):
            self._bases.delete_unused(fingerprint, name)
