"""This module turns the reason for a bad rating into evidence for the taste model.

A reason compares the reply with another reply that the user would have liked better. The other reply differs
only in one measure or a few: it is half as long, twice as long, or in the usual tone. So a reason is a
preference for a reply that does not exist. The rating itself stays evidence, too.
"""

import math
from dataclasses import replace

from .taste import PreferredFeatures
from .taste_features import ReplyFeatures
from .taste_measures import MEASURES

_PLACES = {measure.more: place for place, measure in enumerate(MEASURES)}
_LENGTH = _PLACES["longer replies"]
# the fall of the length measure if a reply has half of its words
_HALF = math.log(2) / MEASURES[_LENGTH].spread
_TONE = [
    _PLACES[name]
    for name in (
        "longer words", "contractions", "more 'you'", "more 'I'", "more 'we'", "exclamation marks",
        "questions back", "more caution",
    )
]  # fmt: skip


def asked_for(reply: ReplyFeatures, reason: str) -> PreferredFeatures | None:
    """Return the preference that a reason states: "long", "short" or "tone". Return None for other
    reasons."""
    measures = reply.measures.copy()
    if reason in ("long", "short"):
        measures[_LENGTH] += _HALF if reason == "short" else -_HALF
    elif reason == "tone":
        measures[_TONE] = 0  # 0 is the value of a usual reply
    else:
        return None
    return PreferredFeatures(replace(reply, measures=measures), reply, is_reason=True)
