"""The ledger: which ratings are in force, which adapter version they led to, and the way back.

It needs the store alone, no weights: `learn status` and `learn undo` answer without loading a model.
"""

from dataclasses import dataclass

from ..errors import NotFound
from ..store import AdapterRow, RatingRow, Store
from .instant import KL_CAP


@dataclass(frozen=True)
class LearnStatus:
    """updates: ratings that moved the weights. kl, kl_cap: nats per token on neutral text.
    versions: those that rollback can reach.
    """

    ratings: int
    updates: int
    adapter_version: int
    kl: float
    kl_cap: float
    micro_norm: float
    versions: list[int]


class Ledger:
    """Ratings and versions of one named adapter on one model (known by its fingerprint)."""

    def __init__(self, store: Store, fingerprint: str, name: str = "default"):
        self._store, self._mine, self.name = store, (fingerprint, name), name

    def version(self) -> int:
        """The version in use; 0 is the untouched model."""
        return self._store.adapter_version(*self._mine)

    def adapter(self, version: int) -> AdapterRow:
        return self._store.adapter(*self._mine, version)

    def ratings(self) -> list[RatingRow]:
        """Ratings in force, the oldest first."""
        return self._store.ratings(*self._mine)

    def steps_of_reply(self, head: int, reply_id: str) -> list[tuple[int, int]]:
        """(version before, version after) of every rating of a reply on the way to a version."""
        return self._store.steps_of_reply(*self._mine, head, reply_id)

    def examples(self) -> list[tuple[str, str, str]]:
        """(prompt, reply, rating) of every rating in force."""
        return self._store.rated_texts(*self._mine)

    def commit(
        self, parent: int, reply_id: str, rating: str, note: str, weight: float,
        state: bytes, kl: float, norm: float,
    ) -> int:  # fmt: skip
        """Write a rating and the weights it made in one transaction; returns their version.

        HeadMoved, if the version in use is not `parent` any more: nothing is written then.
        """
        with self._store.transaction():
            version = self._store.add_version(*self._mine, parent, state, kl, norm)
            self._store.add_rating(*self._mine, version, reply_id, rating, note, weight)
        return version

    def undo(self) -> LearnStatus:
        """Take the last rating back: the adapter is again, bit for bit, what it was before it."""
        with self._store.transaction():
            version = self.version()
            if version == 0:
                raise NotFound("there is no rating to take back.")
            self._store.move_head(*self._mine, self.adapter(version).parent, "undo")
        return self.status()

    def rollback(self, version: int) -> LearnStatus:
        """Use another version; 0 is the untouched model. Only ratings that led to it still count."""
        with self._store.transaction():
            self._store.move_head(*self._mine, version)
        return self.status()

    def status(self) -> LearnStatus:
        ratings, version = self.ratings(), self.version()
        row = self.adapter(version) if version else None
        return LearnStatus(
            ratings=len(ratings),
            updates=sum(r.weight != 0 for r in ratings),
            adapter_version=version,
            kl=row.kl if row else 0.0,
            kl_cap=KL_CAP,
            micro_norm=row.norm if row else 0.0,
            versions=self._store.adapter_versions(*self._mine),
        )
