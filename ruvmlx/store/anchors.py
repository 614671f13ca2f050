"""What the deep loop leaves: anchors, the memory's pruned entries, and a measurement that was stopped.

An anchor points at a base, which is kept as long as the anchor is.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .adapters import Adapters
from .witness import digest


@dataclass(frozen=True)
class AnchorRow:
    """version: in use when it was made. base: where the base LoRA stood. fisher: a Fisher as bytes."""

    id: int
    version: int
    base: int
    fisher: bytes


@dataclass(frozen=True)
class DeepRun:
    """One that came to an end. created: seconds since 1970."""

    version: int
    report: dict[str, Any]
    created: float


class Anchors(Adapters):
    """The deep loop's tables of each named adapter of a model."""

    def anchors(self, fingerprint: str, name: str) -> list[AnchorRow]:
        """Those whose version is on the way to the one in use, the oldest first."""
        head = self.adapter_version(fingerprint, name)
        rows = self._rows(
            "SELECT id, version, base, fisher FROM anchors WHERE fingerprint = ? AND name = ? ORDER BY id",
            fingerprint,
            name,
        )
        return [AnchorRow(*row) for row in rows if self.is_ancestor(fingerprint, name, row[1], head)]

    def add_anchor(
        self,
        fingerprint: str,
        name: str,
        version: int,
        base: int,
        fisher: bytes,
        limit: int,
        merge: Callable[[bytes, bytes], bytes],
    ) -> int:
        """Its id. Call inside a transaction.

        Beyond `limit`, those that an undo has left behind go first; then the oldest is merged into the next,
        merge(earlier, later) of their Fishers.
        """
        made = self._db.execute(
            "INSERT INTO anchors (fingerprint, name, version, base, fisher, created)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (fingerprint, name, version, base, fisher, time.time()),
        )
        kept = self.anchors(fingerprint, name)
        sql = "SELECT count(*) FROM anchors WHERE fingerprint = ? AND name = ?"
        if (count := self._row(sql, fingerprint, name)) and count[0] > limit:
            ids = ",".join(str(row.id) for row in kept)
            self._db.execute(
                f"DELETE FROM anchors WHERE fingerprint = ? AND name = ? AND id NOT IN ({ids})",
                (fingerprint, name),
            )
        while len(kept) > limit:
            earlier, later = kept[:2]
            both = merge(earlier.fisher, later.fisher)
            self._db.execute("UPDATE anchors SET fisher = ? WHERE id = ?", (both, later.id))
            self._db.execute("DELETE FROM anchors WHERE id = ?", (earlier.id,))
            kept[:2] = [AnchorRow(later.id, later.version, later.base, both)]
        self._forget_old_bases(fingerprint, name)
        facts = {"id": made.lastrowid, "version": version, "base": base, "fisher": digest(fisher)}
        self.record("anchor", {"model": fingerprint, "adapter": name, **facts})
        return int(made.lastrowid or 0)

    # -- runs ----------------------------------------------------------------------------------------

    def end_deep_run(
        self, fingerprint: str, name: str, version: int, report: Mapping[str, Any], pruned: Mapping[str, str]
    ) -> None:
        """What a run found, and all that is pruned: rating by reply. Call inside a transaction."""
        self._db.execute(
            "INSERT OR REPLACE INTO deep_runs VALUES (?, ?, ?, ?, ?)",
            (fingerprint, name, version, json.dumps(report), time.time()),
        )
        self._db.execute("DELETE FROM pruned WHERE fingerprint = ? AND name = ?", (fingerprint, name))
        self._db.executemany(
            "INSERT INTO pruned SELECT ?, ?, ?, id FROM replies WHERE id = ?",
            [(fingerprint, name, rating, reply_id) for reply_id, rating in pruned.items()],
        )
        self._db.execute("DELETE FROM measurements WHERE fingerprint = ? AND name = ?", (fingerprint, name))
        self.record("deep", {"model": fingerprint, "adapter": name, "version": version, **report})

    def deep_run(self, fingerprint: str, name: str) -> DeepRun | None:
        """The newest that came to an end."""
        row = self._row(
            "SELECT version, report, created FROM deep_runs WHERE fingerprint = ? AND name = ?",
            fingerprint,
            name,
        )
        return DeepRun(row[0], json.loads(row[1]), row[2]) if row else None

    def first_rating(self, fingerprint: str, name: str) -> float | None:
        """When the oldest rating in force was given."""
        row = self._row(
            "SELECT min(created) FROM ratings WHERE fingerprint = ? AND adapter = ? AND in_force",
            fingerprint,
            name,
        )
        return row[0] if row else None

    def pruned(self, fingerprint: str, name: str) -> dict[str, str]:
        """Rating by reply id, of what likeness finds no more."""
        rows = self._rows(
            "SELECT reply_id, rating FROM pruned WHERE fingerprint = ? AND name = ?", fingerprint, name
        )
        return dict(rows)

    # -- one that was stopped --------------------------------------------------------------------------

    def measurement(self, fingerprint: str, name: str) -> bytes | None:
        sql = "SELECT state FROM measurements WHERE fingerprint = ? AND name = ?"
        row = self._row(sql, fingerprint, name)
        return row[0] if row else None

    def put_measurement(self, fingerprint: str, name: str, state: bytes) -> None:
        """Keep where a run stands, in place of what was kept before."""
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?)", (fingerprint, name, state)
            )
