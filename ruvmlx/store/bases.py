"""This module stores the base LoRAs of each adapter, and the consolidations (trainings) that tried to make
one.

A base LoRA is written once. Later versions of the adapter refer to the base LoRA by its id. Id 0 means that
there is no base LoRA.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from ..errors import NotFound
from .audit_log import Witness, digest
from .database import Database, columns


@dataclass(frozen=True)
class Attempt:
    """The result of one consolidation (a training that tried to make a base LoRA)."""

    parent: int
    version: int | None  # the version that the consolidation made; None: the result was refused
    report: dict[str, Any]  # the measurements of the consolidation


class Bases:
    """This class reads and writes the tables `bases` and `attempts`. The weights of a base LoRA are deleted
    when no anchor and no version that has its own weights uses them."""

    def __init__(self, db: Database, witness: Witness):
        self._db, self._witness = db, witness

    def get(self, fingerprint: str, name: str, id_: int) -> bytes:
        """Return a BaseLoRA as bytes. Raises NotFound if the weights of the base were deleted."""
        state = self._db.value(
            "SELECT state FROM bases WHERE fingerprint = ? AND name = ? AND id = ?", fingerprint, name, id_
        )
        if state is None:
            raise NotFound(
                f"base {id_} of adapter {name!r} is no longer kept; `ruvmlx learn status` lists what is."
            )
        return state

    def report(self, fingerprint: str, name: str, id_: int) -> dict[str, Any]:
        """Return the report of the consolidation that made a base LoRA; {} if there is no such base LoRA."""
        sql = "SELECT report FROM bases WHERE fingerprint = ? AND name = ? AND id = ?"
        return json.loads(self._db.value(sql, fingerprint, name, id_) or "{}")

    def add(self, fingerprint: str, name: str, state: bytes, report: dict[str, Any]) -> int:
        """Add a base LoRA and return its id. No adapter of this name uses this id again. Call inside a
        transaction."""
        newest = self.newest(fingerprint, name)
        self._db.insert(
            "bases",
            fingerprint=fingerprint,
            name=name,
            id=newest + 1,
            state=state,
            report=json.dumps(report),
            created=time.time(),
        )
        self._record(fingerprint, name, newest + 1, state)
        return newest + 1

    def newest(self, fingerprint: str, name: str) -> int:
        """Return the highest id that a base LoRA of this adapter, or of a removed adapter of this name, ever
        had; 0 if there was no base LoRA."""
        return self._db.value(
            "SELECT max(coalesce((SELECT max(id) FROM bases WHERE fingerprint = ?1 AND name = ?2), 0),"
            " coalesce((SELECT base FROM removed_adapters WHERE fingerprint = ?1 AND name = ?2), 0))",
            fingerprint,
            name,
        )

    def _record(self, fingerprint: str, name: str, id_: int, state: bytes | None) -> None:
        facts = {"id": id_, "state": digest(state) if state is not None else None}
        self._witness.record("base", {"model": fingerprint, "adapter": name, **facts})

    def copy(self, fingerprint: str, name: str, new: str, shift: int) -> None:
        """Copy from adapter `name` to adapter `new` the base LoRAs that the versions of `new` use. Call
        inside a transaction. shift: the number to add to the ids"""
        self._db.execute(
            "INSERT INTO bases (fingerprint, name, id, state, report, created)"
            " SELECT fingerprint, ?3, id + ?4, state, report, created FROM bases"
            " WHERE fingerprint = ?1 AND name = ?2"
            " AND id + ?4 IN (SELECT base FROM adapters WHERE fingerprint = ?1 AND name = ?3)",
            fingerprint,
            name,
            new,
            shift,
        )
        self.delete_unused(fingerprint, new)
        sql = "SELECT id, state FROM bases WHERE fingerprint = ? AND name = ?"
        for row in self._db.rows(sql, fingerprint, new):
            self._record(fingerprint, new, row["id"], row["state"])

    def delete_unused(self, fingerprint: str, name: str) -> None:
        """Delete the weights of each base LoRA that nothing can load any more: no anchor uses the base LoRA,
        and of the versions that use it, no version has weights in the store.

        Call inside a transaction.
        """
        self._db.execute(
            "UPDATE bases SET state = NULL WHERE fingerprint = ?1 AND name = ?2 AND state IS NOT NULL"
            " AND id NOT IN (SELECT base FROM adapters WHERE fingerprint = ?1 AND name = ?2"
            " AND state IS NOT NULL)"
            " AND id NOT IN (SELECT base FROM anchors WHERE fingerprint = ?1 AND name = ?2)",
            fingerprint,
            name,
        )

    # -- consolidations ------------------------------------------------------------------------------

    def add_attempt(
        self, fingerprint: str, name: str, parent: int, version: int | None, report: dict[str, Any]
    ) -> None:
        """Add the result of a consolidation. Call inside a transaction."""
        self._db.insert(
            "attempts",
            fingerprint=fingerprint,
            name=name,
            parent=parent,
            version=version,
            report=json.dumps(report),
            created=time.time(),
        )
        facts = {"model": fingerprint, "adapter": name, "parent": parent, "version": version}
        self._witness.record("consolidation", facts)

    def attempts(self, fingerprint: str, name: str) -> list[Attempt]:
        """Return all consolidations of an adapter, oldest first."""
        rows = self._db.rows(
            f"SELECT {columns(Attempt)} FROM attempts WHERE fingerprint = ? AND name = ? ORDER BY id",
            fingerprint,
            name,
        )
        return [Attempt(**dict(row) | {"report": json.loads(row["report"])}) for row in rows]
