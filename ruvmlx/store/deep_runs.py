"""This module stores the results of the deep loop: the newest report, and the ratings that the loop removed
from the rating index."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .audit_log import Witness
from .checkpoints import Checkpoints
from .database import Database, columns


@dataclass(frozen=True)
class DeepRun:
    """A finished run of the deep loop.

    version: the version in use at the end of the run
    created: seconds since 1970
    """

    version: int
    report: dict[str, Any]
    created: float


class DeepRuns:
    """This class reads and writes the tables `deep_runs` and `pruned`. The tables hold the last run of each
    adapter (fingerprint, name)."""

    def __init__(self, db: Database, witness: Witness, checkpoints: Checkpoints):
        self._db, self._witness, self._checkpoints = db, witness, checkpoints

    def add(
        self, fingerprint: str, name: str, version: int, report: Mapping[str, Any], pruned: Mapping[str, str]
    ) -> None:
        """Replace the adapter's last run and its pruned ratings. Call inside a transaction.

        pruned: {reply id: rating}
        """
        self._db.replace(
            "deep_runs",
            fingerprint=fingerprint,
            name=name,
            version=version,
            report=json.dumps(report),
            created=time.time(),
        )
        self._db.execute("DELETE FROM pruned WHERE fingerprint = ? AND name = ?", fingerprint, name)
        for reply_id, rating in pruned.items():
            self._db.execute(
                "INSERT INTO pruned (fingerprint, name, rating, reply_id)"
                " SELECT ?, ?, ?, id FROM replies WHERE id = ?",
                fingerprint,
                name,
                rating,
                reply_id,
            )
        self._checkpoints.delete_measurement(fingerprint, name)
        facts = {"model": fingerprint, "adapter": name, "version": version, **report}
        self._witness.record("deep", facts)

    def newest(self, fingerprint: str, name: str) -> DeepRun | None:
        row = self._db.row(
            f"SELECT {columns(DeepRun)} FROM deep_runs WHERE fingerprint = ? AND name = ?", fingerprint, name
        )
        return DeepRun(**dict(row) | {"report": json.loads(row["report"])}) if row else None

    def pruned_ratings(self, fingerprint: str, name: str) -> dict[str, str]:
        """Return {reply id: rating} of the ratings that the rating index leaves out."""
        rows = self._db.rows(
            "SELECT reply_id, rating FROM pruned WHERE fingerprint = ? AND name = ?", fingerprint, name
        )
        return {row["reply_id"]: row["rating"] for row in rows}
