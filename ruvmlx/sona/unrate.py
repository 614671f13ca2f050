"""This module takes back the rating of one reply, even if the user has given other ratings since. The ratings
and preferences in force are then as if the user had never rated the reply."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter

from ..errors import NotFound, UsageError
from ..store import Store
from .adapter_history import LearnStatus
from .learner import Learner


def take_back(store: Store, learner: Learner, reply_id: str) -> LearnStatus:
    """Go back to the adapter version before the reply's first rating, and give the later ratings of other
    replies and the later preferences again, in one transaction. If the rating is the newest feedback, the
    weights are then bit for bit the weights before the rating, as after an undo.

    Raises NotFound if the reply has no rating, or if the store no longer has the version before the rating.
    Raises UsageError if a new base LoRA came into use after the rating, or if the words of a reply that was
    rated later were deleted.
    """
    history, active = learner.history, learner.active
    learner.rateable(reply_id)
    active.catch_up()
    steps = history.steps_of_reply(learner.version, reply_id)
    if not steps:
        raise NotFound(f"reply {reply_id} has no rating to take back.")
    before, first = steps[0]
    if history.last_promotion() > first:
        raise UsageError(
            f"training has used the rating of reply {reply_id}; `ruvmlx learn rollback` goes back before it."
        )
    active.load(before)
    later = _later(learner, first, reply_id)
    try:
        with store.transaction():
            history.go_back(before)
            for give_again in later:
                give_again()
    except BaseException as error:
        active.reload()
        if isinstance(error, NotFound):
            raise UsageError(
                f"the rating of reply {reply_id} stays: a reply that was rated later has lost its words, so "
                f"its rating cannot be given again. `ruvmlx learn rollback {before}` takes all of them back."
            ) from None
        raise
    active.catch_up()
    return history.status()


def _later(learner: Learner, first: int, reply_id: str) -> list[Callable[[], object]]:
    """Return one function for each rating and preference in force that made adapter version `first` or a
    later version, the oldest first. Each function gives its rating or preference again. Ratings of the reply
    `reply_id` are left out. The other ratings of a batch (rating_batch.py) are given one by one."""
    history, found = learner.history, list[tuple[int, Callable[[], object]]]()
    for row in history.ratings():
        if row.reply_id != reply_id:
            found.append((row.version_after, partial(learner.rate, row.reply_id, row.rating, row.note)))
    for pair in history.pairs.in_force():
        kind = history.pairs.kind(pair.version)
        again = partial(learner.prefer, pair.better, pair.worse, kind, pair.strength)
        found.append((pair.version, again))
    return [give for version, give in sorted(found, key=itemgetter(0)) if version >= first]
