"""This module estimates the quality of one reply without a rating: a number from 0 to 1 with its parts.

    quality = product over the parts of part ^ (weight / sum of the weights of the known parts)

| part       | weight | 1 means | 0 means |
|------------|--------|---------|---------|
| repetition | 3      | at most half of the newest tokens repeat earlier ones | the reply is a loop |
| length     | 3      | the reply has the length that the question asks for   | it has nothing of it |
| ending     | 2      | the model ended the reply                             | the reply is empty |
| taste      | 2      | the user would give 5 stars                           | the user would give 1 star |
| agreement  | 1      | the other samples have the same words                 | they share no word |

A part that is not known is left out: `length` if the question names no length, `taste` if the ratings do not
predict clearly, `agreement` if no other samples exist (best of n), `ending` if the user stopped the reply. A
part counts as at least SMALLEST_PART, so that the other parts still order the worst replies.

The estimate says what a reply looks like, not whether it is true. No weight learns from it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log

from ..engine.repetition import SHARE, Repetition
from ..engine.types import GenerationResponse
from ..models.text import thinking
from .asked_length import asked_length

WEIGHTS = {"repetition": 3.0, "length": 3.0, "ending": 2.0, "taste": 2.0, "agreement": 1.0}
SMALLEST_PART = 0.02
# From this share of repeated tokens the part `repetition` is below 1. Tables and code have up to this share.
USUAL_REPEATS = 0.5
# the part `ending` of a reply that its token limit cut off: inside a sentence, and after a whole sentence
CUT_OFF_SCORE, WHOLE_SENTENCE_SCORE = 0.4, 0.7
# The taste predicts clearly if its stars are at least this many standard deviations from the neutral stars.
CLEAR_DEVIATIONS = 1.0
_NEUTRAL, _STARS = 3.0, (1.0, 5.0)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class ReplyQuality:
    """The estimated quality of a reply, 0 to 1, and its parts, 0 to 1 each."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PredictedStars:
    """The taste model's prediction of the stars for a reply. mean: the expected stars; deviation: their
    standard deviation."""

    mean: float
    deviation: float


def estimate(
    question: str,
    response: GenerationResponse,
    taste: PredictedStars | None = None,
    others: Sequence[str] = (),
) -> ReplyQuality | None:
    """Return the estimated quality of a reply; None if no part is known.

    taste: the prediction of the taste model; None: there is none
    others: the texts of the other samples to the same question
    """
    answer = thinking.split(response.text).answer
    found = {
        "repetition": repetition(response),
        "length": length(question, answer) if not response.calls else None,
        "ending": ending(response, answer),
        "taste": taste_part(taste),
        "agreement": agreement(answer, others),
    }
    parts = {name: round(part, 4) for name, part in found.items() if part is not None}
    return ReplyQuality(combine(parts), parts) if parts else None


def combine(parts: Mapping[str, float]) -> float:
    """Return the weighted geometric mean of the parts."""
    whole = sum(WEIGHTS[name] for name in parts)
    logs = sum(WEIGHTS[name] * log(max(SMALLEST_PART, part)) for name, part in parts.items())
    return round(exp(logs / whole), 4)


def repetition(response: GenerationResponse) -> float | None:
    """Return 1 if at most the share USUAL_REPEATS of the newest tokens repeat earlier tokens, and 0 from the
    share on at which the engine ends a looping reply."""
    if response.repeats:
        return 0.0
    if not response.token_ids:
        return None
    share = Repetition(response.token_ids).share
    return 1.0 - min(1.0, max(0.0, (share - USUAL_REPEATS) / (SHARE - USUAL_REPEATS)))


def length(question: str, answer: str) -> float | None:
    asked = asked_length(question)
    return None if asked is None else asked.score(answer)


def ending(response: GenerationResponse, answer: str) -> float | None:
    if response.finish_reason == "cancelled":
        return None
    if not answer.strip() and not response.calls:
        return 0.0
    if response.finish_reason != "length":
        return 1.0
    return WHOLE_SENTENCE_SCORE if answer.rstrip().endswith((".", "!", "?", "```", '"')) else CUT_OFF_SCORE


def taste_part(taste: PredictedStars | None) -> float | None:
    """Return the predicted stars as a number from 0 to 1; None if the prediction is not clear."""
    if taste is None or abs(taste.mean - _NEUTRAL) < CLEAR_DEVIATIONS * taste.deviation:
        return None
    least, most = _STARS
    return min(1.0, max(0.0, (taste.mean - least) / (most - least)))


def agreement(answer: str, others: Sequence[str]) -> float | None:
    """Return the mean share of words that the answer has in common with each of the other samples: twice the
    common words, divided by all words of both (the Dice coefficient of the bags of words)."""
    if not others:
        return None
    mine = _words(answer)
    found = [_common_share(mine, _words(thinking.split(other).answer)) for other in others]
    return sum(found) / len(found)


def _words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text.lower()))


def _common_share(one: Counter[str], other: Counter[str]) -> float:
    both = one.total() + other.total()
    return 2 * (one & other).total() / both if both else 0.0
