"""This module updates the adapter's weights once for several ratings.

    batch = RatingBatch()
    batch.accumulate(learner, reply_id, "up")      # `pending` is the number of ratings
    batch.apply(learner)                           # one update, one adapter version, one transaction
    batch.apply_with_ewc(learner, 12, 1.0)         # the same, held near what version 12 had learned
    batch.reset()                                  # discard the ratings

All ratings of a batch get their weights under the same adapter, the one in use when the batch is applied, so
their order hardly matters. One undo takes the whole batch back. Until a batch is applied, its ratings are
only in memory, and the weights and the store do not change.
"""

import time
from dataclasses import dataclass

import numpy as np

from ..errors import NotFound, UsageError
from ..text import count
from . import instant, objective
from .evidence import Protect
from .learner import Learner


@dataclass(frozen=True)
class BatchResult:
    """The result of one update by a batch of ratings.

    ratings: the number of ratings in the batch
    applied: True if the ratings changed the adapter
    kl, kl_cap: the KL to the frozen model after the update, and its maximum, nats per token
    adapter_version: the version that the batch made
    seconds: the duration of the update and its commit
    """

    ratings: int
    applied: bool
    kl: float
    kl_cap: float
    adapter_version: int
    seconds: float


class RatingBatch:
    """Ratings that wait for one common update. A later rating of the same reply replaces the earlier one."""

    def __init__(self) -> None:
        self._given = dict[str, tuple[str, str]]()  # {reply id: (rating, note)}

    @property
    def pending(self) -> int:
        """The number of ratings that wait."""
        return len(self._given)

    def reset(self) -> None:
        """Discard the ratings that wait."""
        self._given.clear()

    def accumulate(self, learner: Learner, reply_id: str, rating: str, note: str = "") -> int:
        """Add a rating. Return the number of ratings that wait. Raises the errors of `Learner.rate` for an
        unknown rating, an unknown reply and another model's reply."""
        rating = objective.check_rating(rating)
        self._given[learner.rateable(reply_id).id] = rating, note
        return self.pending

    def apply(self, learner: Learner) -> BatchResult:
        """Discard the ratings of deleted replies. Update the weights once by all other ratings. Store the
        weights and the ratings. Raises UsageError if no rating waits. Raises NotFound if all replies were
        deleted. If the update fails, the other ratings still wait. The weights and the store are then
        unchanged."""
        return self._apply(learner, None)

    def apply_with_ewc(self, learner: Learner, version: int, strength: float = 1.0) -> BatchResult:
        """Do the same as `apply`, with an EWC penalty (evidence.py) on changes of what an earlier version of
        the adapter had learned.

        version: the earlier version, one of those that `rollback` accepts
        strength: the factor of the penalty, 0 or more

        Raises UsageError for another strength, and for a version with another lora_a (a consolidation or
        another rank changed it). Raises NotFound if the store has no weights of this version.
        """
        if not 0 <= strength < instant.MAX_MAGNITUDE:
            raise UsageError(f"the strength of the penalty is {strength}; it must be 0 or more.")
        kept = learner.active.load(version).micro
        if not np.array_equal(kept.lora_a, learner.micro.lora_a):
            raise UsageError(f"version {version} learned along other directions; name a later version.")
        return self._apply(learner, (kept, strength))

    def _apply(self, learner: Learner, protect: Protect | None) -> BatchResult:
        if not self._given:
            raise UsageError("no rating waits; accumulate one first.")
        started = time.perf_counter()
        self._discard_deleted(learner)
        learner.active.measure(is_hurried=True)
        made = learner.retry_commit(lambda: learner.commit_ratings(self._given, protect))
        ratings, after = self.pending, made.after
        self.reset()
        seconds = time.perf_counter() - started
        return BatchResult(ratings, made.has_effect, after.kl, instant.KL_CAP, after.version, seconds)

    def _discard_deleted(self, learner: Learner) -> None:
        """Discard the ratings whose replies were deleted. Raises NotFound if no rating is left."""
        asked = self.pending
        self._given = {id_: given for id_, given in self._given.items() if _has_tokens(learner, id_)}
        if not self._given:
            raise NotFound(
                f"nothing was applied: of the {count(asked, 'reply', 'replies')} whose ratings waited, all "
                "were deleted. Accumulate ratings of other replies."
            )


def _has_tokens(learner: Learner, reply_id: str) -> bool:
    """Return False if the reply or its prompt was deleted, so that nothing can learn from the reply."""
    try:
        reply = learner.rateable(reply_id)
    except NotFound:
        return False
    return bool(reply.rated_ids and reply.prompt_ids)
