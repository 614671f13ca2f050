"""A reason for a bad rating as evidence of the taste model.

A reason compares the reply with one that the user would have liked better and that differs from it in a few
measures alone: half as long, twice as long, in the usual tone. It is a preference for that reply, which
nobody wrote. The rating itself counts as before.
"""

import math
from dataclasses import replace

from .taste import PreferredFeatures
from .taste_features import ReplyFeatures
from .taste_measures import MEASURES

_PLACES = {measure.more: place for place, measure in enumerate(MEASURES)}
_LENGTH = _PLACES["longer replies"]
_HALF = math.log(2) / MEASURES[_LENGTH].spread  # by which the measure of a reply with half of the words falls
_TONE = [
    _PLACES[name]
    for name in (
        "longer words", "contractions", "more 'you'", "more 'I'", "more 'we'", "exclamation marks",
        "questions back", "more caution",
    )
]  # fmt: skip


def asked_for(reply: ReplyFeatures, reason: str) -> PreferredFeatures | None:
    """The preference that a reason states: "long", "short" or "tone"; None for a reason that states none."""
    measures = reply.measures.copy()
    if reason in ("long", "short"):
        measures[_LENGTH] += _HALF if reason == "short" else -_HALF
    elif reason == "tone":
        measures[_TONE] = 0  # as in a usual reply
    else:
        return None
    return PreferredFeatures(replace(reply, measures=measures), reply, is_reason=True)
