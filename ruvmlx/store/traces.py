"""This module stores the traces of the newest replies. A trace holds the gradient of a reply; a later rating
of the reply uses this gradient (sona/trace.py)."""

from .database import Database

# the number of newest replies whose trace is kept; a rating of an older reply computes the gradient again
# from the reply's tokens
KEEP_TRACES = 50


class Traces:
    """This class reads and writes the table `traces`. A trace is deleted with its reply."""

    def __init__(self, db: Database):
        self._db = db

    def get(self, reply_id: str) -> bytes | None:
        return self._db.value("SELECT data FROM traces WHERE reply_id = ?", reply_id)

    def put(self, reply_id: str, data: bytes) -> None:
        """Commit a reply's trace, unless the reply's words were deleted, because a trace holds them, too.
        Delete the oldest traces beyond KEEP_TRACES."""
        with self._db.transaction():
            seq = self._db.value("SELECT seq FROM replies WHERE id = ? AND prompt_ids != x''", reply_id)
            if seq is None:
                return
            self._db.replace("traces", reply_id=reply_id, seq=seq, data=data)
            self._db.execute(
                "DELETE FROM traces WHERE seq <= (SELECT seq FROM traces ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                KEEP_TRACES,
            )

    def delete(self, reply_id: str) -> None:
        """Delete a reply's trace. Call inside a transaction."""
        self._db.execute("DELETE FROM traces WHERE reply_id = ?", reply_id)

    def delete_of_adapter(self, fingerprint: str, name: str) -> None:
        """Delete the traces of the replies that an adapter wrote. Call inside a transaction."""
        self._db.execute(
            "DELETE FROM traces WHERE reply_id IN"
            " (SELECT id FROM replies WHERE fingerprint = ? AND adapter = ? AND adapter_version > 0)",
            fingerprint,
            name,
        )
