"""The ledger: which ratings are in force, which adapter version they led to, and the way back.

It needs the store alone, no weights: `learn status` and `learn undo` answer without loading a model.
"""

from dataclasses import dataclass

from ..errors import NotFound
from ..store import AdapterRow, RatingRow, ReplyRow, Store
from .instant import KL_CAP


@dataclass(frozen=True)
class LearnStatus:
    """kl and kl_cap: nats per token on neutral text. versions: those that rollback can reach."""

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
        self._store, self._fingerprint, self.name = store, fingerprint, name

    def version(self) -> int:
        """The version in use; 0 is the untouched model."""
        return self._store.adapter_version(self._fingerprint, self.name)

    def adapter(self, version: int) -> AdapterRow:
        return self._store.adapter(self._fingerprint, self.name, version)

    def ratings(self) -> list[RatingRow]:
        """Ratings in force, the oldest first."""
        return self._store.ratings(self._fingerprint, self.name)

    def rating_of(self, reply_id: str) -> RatingRow | None:
        """The rating in force on a reply."""
        return next((r for r in reversed(self.ratings()) if r.reply_id == reply_id), None)

    def examples(self) -> list[tuple[str, str, str]]:
        """(prompt, reply, rating) of every rating in force."""
        return self._store.rated_texts(self._fingerprint, self.name)

    def commit(self, reply: ReplyRow, row: RatingRow, state: bytes | None, kl: float, norm: float) -> int:
        """Write a rating and the weights it made (None: it changed none) in one transaction.

        Returns the version in use afterwards.
        """
        with self._store.transaction():
            version = row.version_before
            if state is not None:
                version = self._store.next_version(self._fingerprint, self.name)
                new = AdapterRow(version, row.version_before, state, kl, norm)
                self._store.put_adapter(self._fingerprint, self.name, new)
            self._store.add_rating(reply, self.name, row, version)
        return version

    def undo(self) -> LearnStatus:
        """Take the last rating back: the adapter is again, bit for bit, what it was before it."""
        ratings = self.ratings()
        if not ratings:
            raise NotFound("there is no rating to take back.")
        last = ratings[-1]
        self._check_reachable(last.version_before)
        with self._store.transaction():
            self._store.take_back(last)
            self._store.point_adapter(self._fingerprint, self.name, last.version_before)
        return self.status()

    def rollback(self, version: int) -> LearnStatus:
        """Use an earlier version again; 0 is the untouched model. Only ratings that led to it still count."""
        self._check_reachable(version)
        with self._store.transaction():
            self._store.point_adapter(self._fingerprint, self.name, version)
            self._store.keep_ratings_of(self._fingerprint, self.name, version)
        return self.status()

    def _check_reachable(self, version: int) -> None:
        if version != 0:
            self.adapter(version)

    def status(self) -> LearnStatus:
        ratings, version = self.ratings(), self.version()
        row = self.adapter(version) if version else None
        return LearnStatus(
            ratings=len(ratings),
            updates=sum(r.version_after != r.version_before for r in ratings),
            adapter_version=version,
            kl=row.kl if row else 0.0,
            kl_cap=KL_CAP,
            micro_norm=row.norm if row else 0.0,
            versions=self._store.adapter_versions(self._fingerprint, self.name),
        )
