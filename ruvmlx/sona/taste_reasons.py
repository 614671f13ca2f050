"""This module turns the reason that a user gave for a bad rating into evidence for the taste model
(taste.py).

A reason compares the rated reply with an imaginary reply that the user would have liked better. The imaginary
reply differs only in a few measures: it is half as long, twice as long, or in a neutral tone (the mean tone
of the starter model's replies). So the taste model gets a preference for the imaginary reply. The bad rating
itself stays evidence, too.
"""

import math

from .taste import PreferredFeatures
from .taste_features import ReplyFeatures
from .taste_measures import MEASURES

_PLACES = {measure.more: place for place, measure in enumerate(MEASURES)}
_LENGTH = _PLACES["longer replies"]
# The fall of the measure of length if a reply loses half of its words.
_HALF = math.log(2) / MEASURES[_LENGTH].spread
_TONE = [
    _PLACES[name]
    for name in (
        "longer words", "contractions", "more 'you'", "more 'I'", "more 'we'", "exclamation marks",
        "questions back", "more caution",
    )
]  # fmt: skip


def asked_for(reply: ReplyFeatures, reason: str) -> PreferredFeatures | None:
    """Return the preference for an imaginary reply that the reason "long", "short" or "tone" states. Return
    None for other reasons. reply: the features of the rated reply."""
    measures, shorter = reply.measures.copy(), {"long": 1, "short": -1}.get(reason, 0)
    if shorter:
        measures[_LENGTH] -= shorter * _HALF
    elif reason == "tone":
        measures[_TONE] = 0  # 0 is the mean of each measure over the starter model's replies
    else:
        return None
    return PreferredFeatures(reply.with_measures(measures), reply, is_reason=True, shorter=shorter)
