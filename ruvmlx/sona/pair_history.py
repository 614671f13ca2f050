"""This module reads and writes the preferences of one adapter in the store. A preference says which of two
replies to one question the user finds better."""

from ..store import PreferenceLabel, PreferenceRow, RatedReply, Store


class PairHistory:
    """The part of AdapterHistory that keeps preferences. key: (fingerprint of the model, name of the
    adapter)."""

    def __init__(self, store: Store, key: tuple[str, str]):
        self._store, self._key = store, key

    def in_force(self) -> list[PreferenceLabel]:
        """Return the preferences in force (the preferences that were not taken back), the oldest first."""
        return self._store.preferences.in_force(*self._key)

    def evidence_weights(self) -> list[tuple[int, float]]:
        """Return (adapter version that the feedback made, weight) of each rating and preference in force:
        first the ratings, the oldest first, then the preferences."""
        pairs = [(preference.version, preference.weight) for preference in self.in_force()]
        return self._store.ratings.weights(*self._key) + pairs

    def trainable_versions(self) -> list[int]:
        """Each rating and each preference makes one adapter version. Return the versions of the ratings and
        preferences that training can use."""
        given = self._store.ratings.trainable_versions(*self._key)
        return given + self._store.preferences.trainable_versions(*self._key)

    def kind(self, version: int) -> str:
        """Return the kind (PreferenceRow.kind) of the preference that made this adapter version."""
        return self._store.preferences.kind(*self._key, version)

    def between(self, one: str, other: str) -> bool:
        """Return True if there is a preference in force between two replies. one, other: the replies' ids."""
        return any({one, other} == {row.better, row.worse} for row in self.in_force())

    def texts(self) -> list[tuple[str, str, str]]:
        """Return (prompt, better reply, worse reply), as texts, of every preference in force whose chat was
        not deleted."""
        return self._store.preferences.texts(*self._key)

    def replies(self, limit: int) -> list[RatedReply]:
        """Return the newest replies, at most `limit`, that are in preferences in force and have no rating,
        each as a RatedReply. Replies that training cannot use are left out."""
        return self._store.preferences.replies(*self._key, limit)

    def steps(self, head: int, one: str, other: str) -> list[tuple[int, int]]:
        """Return (adapter version before, adapter version after) of each preference between two replies. Only
        preferences whose version is `head` or an ancestor of `head` are included."""
        return self._store.preferences.steps_of_pair(*self._key, head, one, other)

    def last_version(self) -> int:
        """Return the newest version that a preference made, among the version in use and its ancestors; 0 if
        no preference made one of these versions."""
        return self._store.preferences.last_version(*self._key, self._store.versions.head(*self._key))

    def commit(self, parent: int, row: PreferenceRow, state: bytes, kl: float, norm: float) -> int:
        """Store a preference and the resulting weights in one transaction. Return the number of the new
        version.

        Raises HeadMoved, and writes nothing, if `parent` is no longer the version in use.
        """
        with self._store.transaction():
            version = self._store.versions.add(*self._key, parent, state, kl, norm)
            self._store.preferences.add(*self._key, version, row)
        return version
