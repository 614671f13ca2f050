"""This module stores the anchors of the deep loop (EWC, elastic weight consolidation). An anchor is a base
LoRA and its Fisher information (how much each weight matters) at the end of a learning task.

The base LoRA of an anchor is kept as long as the anchor.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .audit_log import Witness, digest
from .bases import Bases
from .database import Database, columns
from .versions import Versions


@dataclass(frozen=True)
class AnchorRow:
    id: int
    version: int  # the version in use when the anchor was made
    base: int  # the id of the base LoRA
    fisher: bytes


class Anchors:
    """This class reads and writes the table `anchors`. fingerprint and name: a model and one of its
    adapters."""

    def __init__(self, db: Database, witness: Witness, versions: Versions, bases: Bases):
        self._db, self._witness, self._versions, self._bases = db, witness, versions, bases

    def in_use(self, fingerprint: str, name: str) -> list[AnchorRow]:
        """Return the anchors whose version is the head or one of its ancestors, oldest first."""
        head = self._versions.head(fingerprint, name)
        rows = self._db.rows(
            f"SELECT {columns(AnchorRow)} FROM anchors WHERE fingerprint = ? AND name = ? ORDER BY id",
            fingerprint,
            name,
        )
        anchors = [AnchorRow(**row) for row in rows]
        return [a for a in anchors if self._versions.is_ancestor(fingerprint, name, a.version, head)]

    def add(
        self,
        fingerprint: str,
        name: str,
        version: int,
        base: int,
        fisher: bytes,
        limit: int,
        merge: Callable[[bytes, bytes], bytes],
    ) -> int:
        """Add an anchor and return its id. Call inside a transaction.

        If there are more than `limit` anchors, the anchors whose versions an undo or a rollback took out of
        use are deleted. After that, the Fisher information of the oldest anchor is merged into that of the
        next anchor, and the oldest anchor is deleted, until `limit` anchors are left.

        merge: a function of the Fisher information of two anchors as bytes (earlier, later) that returns the
            merged Fisher information
        """
        id_ = self._db.insert(
            "anchors",
            fingerprint=fingerprint,
            name=name,
            version=version,
            base=base,
            fisher=fisher,
            created=time.time(),
        )
        kept = self.in_use(fingerprint, name)
        if self._count(fingerprint, name) > limit:
            self._delete_others(fingerprint, name, kept)
        while len(kept) > limit:
            kept[:2] = [self._merge_rows(kept[0], kept[1], merge)]
        self._bases.delete_unused(fingerprint, name)
        facts = {"id": id_, "version": version, "base": base, "fisher": digest(fisher)}
        self._witness.record("anchor", {"model": fingerprint, "adapter": name, **facts})
        return id_

    def _count(self, fingerprint: str, name: str) -> int:
        return self._db.value(
            "SELECT count(*) FROM anchors WHERE fingerprint = ? AND name = ?", fingerprint, name
        )

    def _delete_others(self, fingerprint: str, name: str, kept: list[AnchorRow]) -> None:
        ids = ",".join(str(row.id) for row in kept)
        self._db.execute(
            f"DELETE FROM anchors WHERE fingerprint = ? AND name = ? AND id NOT IN ({ids})", fingerprint, name
        )

    def _merge_rows(
        self, earlier: AnchorRow, later: AnchorRow, merge: Callable[[bytes, bytes], bytes]
    ) -> AnchorRow:
        both = merge(earlier.fisher, later.fisher)
        self._db.execute("UPDATE anchors SET fisher = ? WHERE id = ?", both, later.id)
        self._db.execute("DELETE FROM anchors WHERE id = ?", earlier.id)
        return replace(later, fisher=both)
