"""This module reads from the store the reasons that the user gave for bad ratings of one adapter's
replies."""

from ..ratings import reason_of
from ..store import Store


class ReasonHistory:
    """The part of AdapterHistory that reads reasons of bad ratings. key: (fingerprint of the model, name of
    the adapter)."""

    def __init__(self, store: Store, key: tuple[str, str]):
        self._store, self._key = store, key

    def in_force(self) -> list[tuple[str, str, int]]:
        """Return (reply id, reason, adapter version that the rating made) of the ratings in force that have a
        reason."""
        noted = self._store.ratings.notes(*self._key)
        found = [(reply_id, reason_of(rating, note), version) for reply_id, rating, note, version in noted]
        return [row for row in found if row[1]]

    def rating_of(self, reply_id: str) -> tuple[str, str, int] | None:
        """Return (rating, note, adapter version that the rating made) of a reply's rating in force; None if
        no rating of the reply is in force."""
        return self._store.ratings.of_reply(*self._key, reply_id)
