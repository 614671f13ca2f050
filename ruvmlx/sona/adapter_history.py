"""This module keeps the history of an adapter: the ratings in force, the adapter versions that the ratings
made, undo and rollback.

A rating is in force until the user takes it back or replaces it. AdapterHistory needs only the store, and no
model. So the commands `learn status` and `learn undo` need not load a model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import NotFound
from ..lora.base_lora import BaseLoRA
from ..store import (
    Attempt,
    RatedReply,
    RatingRow,
    ReplyWords,
    SignalGroup,
    SignalRow,
    Store,
    VersionRow,
)
from .deep_history import DeepHistory
from .instant import KL_CAP
from .pair_history import PairHistory
from .reason_history import ReasonHistory
from .unshown import UnshownReplies

MINIMUM = 10  # the minimum number of ratings and preferences for a run of the background or style loop
DUE = 16  # the number of new ratings after which the background loop starts
STYLE_DUE = 10  # the number of new ratings after which the style loop starts
NewRating = tuple[str, str, str, float]  # (reply id, rating, note, weight)
ATTEMPTS = 4  # the maximum number of times that a slow loop tries to commit, if ratings arrive meanwhile


@dataclass(frozen=True)
class LearnStatus:
    """The status of an adapter. A consolidation is a run of the background or style loop, which tries to make
    a new base LoRA from the ratings.

    ratings, preferences: the numbers of ratings and preferences in force
    updates: the number of ratings and preferences that changed the weights
    versions: the adapter versions that `rollback` accepts
    pending: the number of ratings and preferences that training can use and that are newer than the newest
        base LoRA
    consolidations: the number of new base LoRAs among the versions that led to the version in use
    last: the newest finished consolidation, promoted or refused; without consolidations whose result a later
        undo or rollback took out of use
    undone: what `undo` took back: "rating", "change of a rating" (a reason, or another rating of a reply that
        was rated before) or "preference"
    kl: the KL divergence of the adapter from the original model; kl_cap: the maximum KL that learning allows
        (both in nats per token on the reference text)
    """

    ratings: int
    updates: int
    adapter_version: int
    kl: float
    kl_cap: float
    micro_norm: float
    versions: list[int]
    pending: int = 0
    consolidations: int = 0
    last: Attempt | None = None
    preferences: int = 0
    undone: str = ""


class AdapterHistory:
    """The history of one named adapter on one model: its ratings and its versions. The fingerprint identifies
    the model (a hash of its configuration and of some weights)."""

    def __init__(self, store: Store, fingerprint: str, name: str = "default", trains: bool = True):
        """trains: True if the background loop can train this model."""
        self._store, self._key = store, (fingerprint, name)
        self.fingerprint, self.name, self.trains = fingerprint, name, trains
        self.deep, self.pairs = DeepHistory(store, self._key), PairHistory(store, self._key)
        self.reasons = ReasonHistory(store, self._key)
        self.unshown = UnshownReplies(store, fingerprint)
        # The number of transactions of this process that failed after they had made a version. The next
        # transaction gives its version the same number. So (version, `failures`) is the key of all that
        # memory keeps about a version.
        self.failures = 0

    def version(self) -> int:
        """Return the number of the adapter version in use; 0 is the original model."""
        return self._store.versions.head(*self._key)

    def adapter(self, version: int) -> VersionRow:
        return self._store.versions.get(*self._key, version)

    def base_of(self, version: int) -> int:
        """Return the id of a version's base LoRA; 0 if the version has no base LoRA. Return another id than
        that of any base LoRA if there is no such version, because its adapter was removed."""
        return self._store.versions.base_of(*self._key, version)

    def base(self, id_: int) -> BaseLoRA:
        return BaseLoRA.from_bytes(self._store.bases.get(*self._key, id_))

    def base_report(self, id_: int) -> dict[str, Any]:
        """Return the report of the consolidation (run of the background or style loop) that made a base
        LoRA."""
        return self._store.bases.report(*self._key, id_)

    def leads_to(self, version: int, head: int) -> bool:
        """Return True if the version is `head` or an ancestor of `head`."""
        return version == 0 or self._store.versions.is_ancestor(*self._key, version, head)

    def ratings(self) -> list[RatingRow]:
        """Return the ratings in force, the oldest first."""
        return self._store.ratings.in_force(*self._key)

    def steps_of_reply(self, head: int, reply_id: str) -> list[tuple[int, int]]:
        """Return (adapter version before, adapter version after) of each rating of the reply. Only ratings
        whose version is `head` or an ancestor of `head` are included."""
        return self._store.ratings.steps_of_reply(*self._key, head, reply_id)

    def examples(self) -> list[tuple[str, str, str]]:
        """Return (prompt, reply, rating) of every rating in force whose chat was not deleted."""
        return self._store.ratings.texts(*self._key)

    def labels(self) -> list[tuple[str, str, int]]:
        """Return (reply id, rating, adapter version that the rating made) of every rating in force, the
        oldest first. Ratings for wrong facts are left out, because the learner does not learn from them."""
        return self._store.ratings.labels(*self._key)

    def words(self, ids: Iterable[str]) -> list[ReplyWords]:
        """Return the texts and features of the replies with these ids, for the taste model."""
        return self._store.replies.words(ids)

    def unrated_words(self, limit: int) -> list[ReplyWords]:
        """Return the texts and features of the newest replies by this adapter without a rating or a
        preference, for the taste model."""
        return self._store.replies.unrated_replies(*self._key, limit)

    def commit(
        self, parent: int, ratings: Sequence[NewRating], state: bytes, kl: float, norm: float,
        signals: Sequence[SignalRow] = (),
    ) -> int:  # fmt: skip
        """Store one rating or several ratings, their learning signals, and the weights that result from the
        ratings together, in one transaction. Return the number of the new adapter version.

        Raises HeadMoved, and writes nothing, if `parent` is no longer the version in use.
        """
        with self._store.transaction():
            version = self._store.versions.add(*self._key, parent, state, kl, norm)
            for reply_id, rating, note, weight in ratings:
                self._store.ratings.add(*self._key, version, reply_id, rating, note, weight)
            self._store.signals.add(signals)
        return version

    def adjust(self, parent: int, state: bytes, kl: float, norm: float) -> int:
        """Store the adapter in use, with scaled-down weights, as a new version that belongs to no rating.
        Raises HeadMoved if `parent` is no longer the version in use."""
        with self._store.transaction():
            return self._store.versions.add(*self._key, parent, state, kl, norm)

    def promote(
        self,
        parent: int,
        base: BaseLoRA,
        state: bytes,
        kl: float,
        norm: float,
        report: dict[str, Any],
        pause: Callable[[], None] = lambda: None,
    ) -> int:
        """Store a new base LoRA, an adapter version with this base, and the report of the consolidation, and
        delete the saved run, in one transaction. Return the number of the adapter version.

        Raises HeadMoved, and writes nothing, if `parent` is no longer the version in use. `pause` can raise
        an exception to stop before the first write.
        """
        data = base.to_bytes()
        pause()
        with self._store.transaction():
            id_ = self._store.bases.add(*self._key, data, report)
            version = self._store.versions.add(*self._key, parent, state, kl, norm, id_)
            self._store.bases.add_attempt(*self._key, parent, version, report)
            self.put_training(None)
        return version

    def refuse(self, parent: int, report: dict[str, Any], ends_run: bool = True) -> None:
        """Store the report of a refused consolidation, which has changed no weights. The report contains the
        reason of the refusal. ends_run: True to delete the saved run in the same transaction; False if the
        refused consolidation was not this run"""
        with self._store.transaction():
            if self._store.versions.has_adapter(*self._key):
                self._store.bases.add_attempt(*self._key, parent, None, report)
            if ends_run:
                self.put_training(None)

    def attempts(self) -> list[Attempt]:
        """Return the finished consolidations (runs of the background or style loop), promoted or refused, the
        oldest first."""
        return self._store.bases.attempts(*self._key)

    def rated_replies(self, limit: int) -> list[RatedReply]:
        """Return the newest replies, at most `limit`, with a rating or a preference that training can use.
        The background loop trains on most of the returned replies, and tests its result on the remaining
        replies."""
        found = self._store.ratings.replies(*self._key, limit) + self.pairs.replies(limit)
        return sorted(found, key=lambda row: row.version)[-limit:]

    def last_promotion(self) -> int:
        """Return the version of the newest promotion (new base LoRA) among the version in use and its
        ancestors; 0 if there is no promotion."""
        found = self._store.versions.promotions(*self._key, self.version())
        return found[-1] if found else 0

    def new_and_missing(self, due: int = DUE) -> tuple[int, int]:
        """Return two counts of ratings and preferences that training can use. The first is the number since
        the last run of the background or style loop. The second is the number that must still come before
        the next run. A loop needs MINIMUM ratings or preferences in all, and `due` since its last run (one if
        the store has a stopped run)."""
        given, attempts = self.pairs.trainable_versions(), self.attempts()
        seen = max(self.last_promotion(), attempts[-1].parent if attempts else 0)
        new = sum(version > seen for version in given)
        enough = 1 if self._store.checkpoints.has_training(*self._key) else due
        return new, max(MINIMUM - len(given), enough - new, 0)

    def training(self) -> bytes | None:
        return self._store.checkpoints.training(*self._key)

    def put_training(self, state: bytes | None, pause: Callable[[], None] = lambda: None) -> None:
        """Replace the saved run as `Checkpoints.put_training` does, unless the adapter was removed."""
        with self._store.transaction():
            if state is None or self._store.versions.has_adapter(*self._key):
                self._store.checkpoints.put_training(*self._key, state, pause)

    def first_rating(self) -> float | None:
        """Return the time of the oldest rating in force, seconds since 1970."""
        return self._store.ratings.first_time(*self._key)

    # -- undo and rollback ---------------------------------------------------------------------------

    def undo(self) -> LearnStatus:
        """Take back the last rating or preference in force. Afterwards, the adapter's weights are bit for bit
        the weights before that feedback.

        If a slow loop made a new base LoRA after that feedback, also take back this base LoRA. Raises
        NotFound if there is no rating and no preference in force, or if the weights before it are no longer
        stored.
        """
        before = self.status()
        with self._store.transaction():
            rated = self._store.ratings.last_version(*self._key, self.version())
            version = max(rated, self.pairs.last_version())
            if version == 0:
                raise NotFound("there is no rating or preference to take back.")
            self._store.versions.move_head(
                *self._key, self._store.versions.parent_of(*self._key, version), "undo"
            )
        found = self.status()
        rating = "rating" if found.ratings < before.ratings else "change of a rating"
        return replace(found, undone=rating if version == rated else "preference")

    def newest_feedback(self) -> str | None:
        """Return the id of the reply whose rating or preference `undo` takes back; of a preference, the id of
        the better reply. Return None if there is no rating and no preference in force."""
        rated = self._store.ratings.last_version(*self._key, self.version())
        preferred = self.pairs.last_version()
        if preferred > rated:
            return self.pairs.in_force()[-1].better
        if rated == 0:
            return None
        # `labels` reads fewer columns than `ratings`, but leaves out ratings for wrong facts
        newest = self.labels()[-1:]
        return newest[0][0] if newest and newest[0][2] == rated else self.ratings()[-1].reply_id

    def go_back(self, version: int) -> None:
        """Make an ancestor version the version in use, because the user took back the later feedback. Call
        this function inside a transaction."""
        self._store.versions.move_head(*self._key, version, "undo")

    def rollback(self, version: int) -> LearnStatus:
        """Make another adapter version the version in use; 0 is the original model. Only the feedback that
        led to this version stays in force."""
        with self._store.transaction():
            self._store.versions.move_head(*self._key, version)
        return self.status()

    def rollback_before(self, when: float) -> tuple[LearnStatus, int]:
        """Make the adapter version that was in use just before the time `when` (seconds since 1970) the
        version in use again, also if the user took it back later. If its weights are no longer kept, its
        newest ancestor with weights is used instead.

        Returns the new status, and the version that was in use then. Raises NotFound if no such weights are
        kept.
        """
        with self._store.transaction():
            then = self._store.versions.head_at(*self._key, when)
            self._store.versions.move_head(*self._key, self._store.versions.nearest_kept(*self._key, then))
        return self.status(), then

    def status(self) -> LearnStatus:
        given, pairs, version = self.pairs.evidence_weights(), len(self.pairs.in_force()), self.version()
        kl, norm = self._store.versions.kl_and_norm(*self._key, version)
        promotions, attempts = self._store.versions.promotions(*self._key, version), self.attempts()
        read = promotions[-1] if promotions else 0
        return LearnStatus(
            ratings=len(given) - pairs,
            updates=sum(weight != 0 for _, weight in given),
            pending=sum(made > read for made in self.pairs.trainable_versions()) if self.trains else 0,
            consolidations=len(promotions),
            adapter_version=version,
            kl=kl,
            kl_cap=KL_CAP,
            micro_norm=norm,
            versions=self._store.versions.kept_versions(*self._key),
            last=next((a for a in reversed(attempts) if a.version in (None, *promotions)), None),
            preferences=pairs,
        )


def newest_question(history: AdapterHistory) -> str:
    """Return the question that the reply of `AdapterHistory.newest_feedback` answers. Return "" if there is
    no such reply, or if its words were deleted."""
    reply_id = history.newest_feedback()
    try:
        return history._store.replies.get(reply_id).prompt if reply_id is not None else ""
    except NotFound:
        return ""


def is_batch(history: AdapterHistory, version: int) -> bool:
    """Return True if several ratings made this version together."""
    return history._store.ratings.count_of(*history._key, version) > 1


def signal_groups(history: AdapterHistory) -> list[SignalGroup]:
    """Return the means of the learning signals (signal.py) about the replies of an adapter's model. The
    signals are grouped by kind, model size and context length."""
    return history._store.signals.groups(history._key[0])


def other_adapters(history: AdapterHistory) -> dict[str, int]:
    """Return {name: version in use} of the model's other adapters. Adapters at version 0 are left out."""
    rows = history._store.adapters.all(history.fingerprint)
    return {row.name: row.version for row in rows if row.name != history.name and row.version}
