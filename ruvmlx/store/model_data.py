"""This module stores data that is computed once for each model: KL probes (they measure how far an adapter
changes the model), the whitening of hidden states (a linear map that makes their directions comparable), and
which model has which fingerprint."""

from ..errors import StoreError
from .database import Database


class ModelData:
    """This class reads and writes the tables `neutral` (KL probes), `whitening` and `known_models`. The key
    of a row is the model's fingerprint; the calibration of a layer LoRA has its own key."""

    def __init__(self, db: Database):
        self._db = db
        self._unsaved: dict[str, bytes] = {}  # fingerprint -> whitening that the store could not take

    def own_fingerprint(self, fingerprint: str, content: str, claim: bool = True) -> str:
        """Return the fingerprint that is the key of a model's data in this store. The result is `content` if
        `fingerprint` belongs to another model, else `fingerprint`. A fingerprint belongs to the first model
        that claimed it.

        content: a hash of bytes of all tensors of the model
        claim: True: claim the fingerprint for this model if the fingerprint belongs to no model yet
        """
        sql = "SELECT content FROM known_models WHERE fingerprint = ?"
        owner = self._db.value(sql, fingerprint)
        if owner is None and claim:
            with self._db.transaction():
                self._db.execute("INSERT OR IGNORE INTO known_models VALUES (?, ?)", fingerprint, content)
                owner = self._db.value(sql, fingerprint)
        return fingerprint if owner in (None, content) else content

    def reference_text(self, fingerprint: str) -> bytes | None:
        """Return, as bytes, a KL probe (key: the model's fingerprint) or the calibration of a layer LoRA (its
        own key). A KL probe and a calibration are measured on the reference text (sona/reference_text.py)."""
        return self._db.value("SELECT data FROM neutral WHERE fingerprint = ?", fingerprint)

    def put_reference_text(self, fingerprint: str, data: bytes) -> None:
        with self._db.transaction():
            self._db.replace("neutral", fingerprint=fingerprint, data=data)

    def whitening(self, fingerprint: str) -> bytes | None:
        """Return the whitening of pooled hidden states (sona/embedding.py), as bytes."""
        stored = self._db.value("SELECT data FROM whitening WHERE fingerprint = ?", fingerprint)
        return self._unsaved.get(fingerprint) if stored is None else stored

    def put_whitening(self, fingerprint: str, data: bytes) -> None:
        """Store the whitening. If the store cannot be written, only this process keeps the whitening, and a
        later process measures it again."""
        try:
            with self._db.transaction():
                self._db.replace("whitening", fingerprint=fingerprint, data=data)
        except StoreError:
            self._unsaved[fingerprint] = data
