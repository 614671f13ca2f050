"""This module stores the measures of unshown replies (sona/unshown.py). Each model has one row in the table
`measurements`. The row has the measures of all its unshown replies. The deletion of a rated reply also
deletes the measures of the unshown replies to its question, because these measures depend on the words of the
question."""

import io
import json
import zipfile
from collections.abc import Collection, Mapping

import numpy as np

from .checkpoints import Checkpoints
from .database import Database

NAME = "replies/unshown"  # the name of the row; no adapter can have this name


class UnshownMeasures:
    """This class reads and writes, for each model, {id of a rated reply: measures [U, M] of U unshown replies
    to its question}."""

    def __init__(self, db: Database, checkpoints: Checkpoints):
        self._db, self._checkpoints = db, checkpoints

    def load(self, fingerprint: str) -> dict[str, np.ndarray]:
        """Return the measures of a model as float32; {} if the stored data is missing or damaged."""
        data = self._checkpoints.measurement(fingerprint, NAME)
        try:
            with np.load(io.BytesIO(data or b""), allow_pickle=False) as f:
                return dict(zip(json.loads(str(f["ids"])), f["measures"].astype(np.float32), strict=True))
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile):
            return {}

    def put(self, fingerprint: str, found: Mapping[str, np.ndarray]) -> None:
        """Replace the measures of a model in one transaction. Leave out the measures of rated replies without
        tokens. Another process can have deleted these replies."""
        with self._db.transaction():
            rows = self._db.rows(
                "SELECT id FROM replies WHERE id IN (SELECT value FROM json_each(?))"
                " AND length(prompt_ids) + length(sampled_ids) > 0",
                json.dumps([*found]),
            )
            here = {row["id"] for row in rows}
            self._replace(fingerprint, {id_: rows for id_, rows in found.items() if id_ in here})

    def delete(self, reply_ids: Collection[str]) -> None:
        """Delete the measures of these replies. Call inside a transaction."""
        rows = self._db.rows("SELECT fingerprint FROM measurements WHERE name = ?", NAME)
        for fingerprint in [row["fingerprint"] for row in rows]:
            found = self.load(fingerprint)
            kept = {id_: measures for id_, measures in found.items() if id_ not in reply_ids}
            if len(kept) < len(found):
                self._replace(fingerprint, kept)

    def _replace(self, fingerprint: str, found: Mapping[str, np.ndarray]) -> None:
        if not found:
            self._checkpoints.delete_measurement(fingerprint, NAME)
            return
        out = io.BytesIO()
        measures = np.stack([*found.values()]).astype(np.float16)
        np.savez(out, ids=np.array(json.dumps([*found])), measures=measures)
        self._checkpoints.put_measurement(fingerprint, NAME, out.getvalue())
