"""This module stores checkpoints of the background loop's training and of the deep loop's measurement, so
that a stopped training or measurement can be resumed."""

from collections.abc import Callable

from .database import Database

WRITTEN = 4 << 20  # a checkpoint is written in pieces of this number of bytes


class Checkpoints:
    """This class reads and writes the tables `trainings` and `measurements`. Each adapter (fingerprint, name)
    has at most one row in each table."""

    def __init__(self, db: Database):
        self._db = db

    def training(self, fingerprint: str, name: str) -> bytes | None:
        return self._db.value(
            "SELECT state FROM trainings WHERE fingerprint = ? AND name = ?", fingerprint, name
        )

    def has_training(self, fingerprint: str, name: str) -> bool:
        sql = "SELECT 1 FROM trainings WHERE fingerprint = ? AND name = ?"
        return self._db.row(sql, fingerprint, name) is not None

    def put_training(
        self, fingerprint: str, name: str, state: bytes | None, pause: Callable[[], None] = lambda: None
    ) -> None:
        """Replace the checkpoint of the adapter's training in one transaction. If `state` is None, delete the
        checkpoint.

        pause: a function that is called after every few megabytes. If `pause` raises an exception, the write
            stops and the earlier checkpoint stays.
        """
        with self._db.transaction():
            self._db.execute("DELETE FROM trainings WHERE fingerprint = ? AND name = ?", fingerprint, name)
            if state is None:
                return
            pause()
            made = self._db.execute(
                "INSERT INTO trainings (fingerprint, name, state) VALUES (?, ?, zeroblob(?))",
                fingerprint,
                name,
                len(state),
            )
            pause()
            with self._db.open_blob("trainings", "state", made.lastrowid or 0) as blob:
                for start in range(0, len(state), WRITTEN):
                    blob.write(state[start : start + WRITTEN])
                    pause()

    def measurement(self, fingerprint: str, name: str) -> bytes | None:
        sql = "SELECT state FROM measurements WHERE fingerprint = ? AND name = ?"
        return self._db.value(sql, fingerprint, name)

    def put_measurement(self, fingerprint: str, name: str, state: bytes) -> None:
        """Replace the checkpoint of the adapter's measurement in one transaction."""
        with self._db.transaction():
            self._db.replace("measurements", fingerprint=fingerprint, name=name, state=state)

    def delete_measurement(self, fingerprint: str, name: str) -> None:
        """Delete the measurement's checkpoint. Call inside a transaction."""
        self._db.execute("DELETE FROM measurements WHERE fingerprint = ? AND name = ?", fingerprint, name)
