"""This module takes back the rating of one reply, even if the user has given other ratings since. The ratings
and preferences in force are then as if the user had never rated the reply."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from ..errors import NotFound, UsageError
from ..store import Store
from .adapter_history import LearnStatus
from .learner import Learner


@dataclass(frozen=True)
class _Feedback:
    """A rating or a preference in force. version: the adapter version that it made. give: a function that
    gives the same feedback again."""

    version: int
    reply_ids: tuple[str, ...]
    give: Callable[[], object]


def take_back(store: Store, learner: Learner, reply_id: str) -> LearnStatus:
    """Go back to the adapter version before the reply's first rating, and give the later ratings of other
    replies and the later preferences again, in one transaction. If the rating is the newest feedback, the
    weights are then bit for bit the weights before the rating, as after an undo.

    Raises NotFound if the reply has no rating, or if the store no longer has the version before the rating.
    Raises UsageError if a new base LoRA came into use after the rating, or if the words of a reply that was
    rated later were deleted.
    """
    active = learner.active
    learner.rateable(reply_id)
    active.catch_up()
    before, later = _feedback_since(learner, reply_id)
    replies = [id_ for feedback in later for id_ in feedback.reply_ids]
    if later:
        active.measure(is_hurried=True)  # in the transaction, other programs would wait for it
    with learner.traces.read_ahead(replies, active.load(before)):
        try:
            with store.transaction():
                active.catch_up()  # another process can have given feedback
                before, later = _feedback_since(learner, reply_id)
                active.load(before)
                learner.history.go_back(before)
                _give_again(later, reply_id, before)
        except BaseException:
            active.reload()
            raise
    active.catch_up()
    return learner.history.status()


def _feedback_since(learner: Learner, reply_id: str) -> tuple[int, list[_Feedback]]:
    """Return the adapter version before the reply's first rating, and the ratings and preferences in force
    that made later versions, the oldest first. Ratings of the reply itself are left out. The other ratings of
    a batch (rating_batch.py) are given one by one."""
    history = learner.history
    steps = history.steps_of_reply(learner.version, reply_id)
    if not steps:
        raise NotFound(f"reply {reply_id} has no rating to take back.")
    before, first = steps[0]
    if history.last_promotion() > first:
        raise UsageError(
            f"training has used the rating of reply {reply_id}; `ruvmlx learn rollback` goes back before it."
        )
    found = list[_Feedback]()
    for row in history.ratings():
        if row.reply_id != reply_id:
            give = partial(_rate, learner, row.reply_id, row.rating, row.note)
            found.append(_Feedback(row.version_after, (row.reply_id,), give))
    for pair in history.pairs.in_force():
        ids = pair.better, pair.worse
        give = partial(_prefer, learner, *ids, history.pairs.kind(pair.version), pair.strength)
        found.append(_Feedback(pair.version, ids, give))
    return before, [x for x in sorted(found, key=attrgetter("version")) if x.version >= first]


def _rate(learner: Learner, reply_id: str, rating: str, note: str) -> None:
    learner.commit_ratings({reply_id: (rating, note)})


def _prefer(learner: Learner, better: str, worse: str, kind: str, strength: float) -> None:
    learner.commit_preference(learner.rateable(better), learner.rateable(worse), kind, strength)


def _give_again(later: list[_Feedback], reply_id: str, before: int) -> None:
    try:
        for feedback in later:
            feedback.give()
    except NotFound:
        raise UsageError(
            f"the rating of reply {reply_id} stays: a reply that was rated later has lost its words, so "
            f"its rating cannot be given again. `ruvmlx learn rollback {before}` takes all of them back."
        ) from None
