"""What is computed once per model and kept."""

from .database import Database


class ModelData:
    """The tables `neutral` and `whitening`, by the model's fingerprint."""

    def __init__(self, db: Database):
        self._db = db

    def reference_text(self, fingerprint: str) -> bytes | None:
        """The reference text on which KL is measured, with the model's log-probabilities."""
        return self._db.value("SELECT data FROM neutral WHERE fingerprint = ?", fingerprint)

    def put_reference_text(self, fingerprint: str, data: bytes) -> None:
        with self._db.transaction():
            self._db.replace("neutral", fingerprint=fingerprint, data=data)

    def whitening(self, fingerprint: str) -> bytes | None:
        """The transform that whitens pooled hidden states."""
        return self._db.value("SELECT data FROM whitening WHERE fingerprint = ?", fingerprint)

    def put_whitening(self, fingerprint: str, data: bytes) -> None:
        with self._db.transaction():
            self._db.replace("whitening", fingerprint=fingerprint, data=data)
