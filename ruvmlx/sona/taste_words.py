"""Says in words what the taste model is sure of: "shorter replies, more 'you'; lists in questions with
'how'"."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .taste_columns import Column
from .taste_features import bucket, grams, opener_of
from .taste_fit import M, TasteFit
from .taste_measures import MEASURES

# Of users who give stars by dice, 2 to 5% show a preference this sure after 10 to 100 ratings (60 simulated
# each).
SURE = 3.5  # standard deviations from zero
MIN_RATINGS = 8  # ratings
FELT = 0.2  # stars that a usual difference between two replies must make
MOST_SAID = 4


@dataclass(frozen=True)
class Liking:
    """One thing that a user likes. stars: what a usual difference between two replies makes. sure: standard
    deviations from zero."""

    words: str
    stars: float
    sure: float


def preferences(fit: TasteFit, ratings: int, rated: Sequence[tuple[str, str]]) -> list[Liking]:
    """What so many ratings support, the strongest first. rated: (question, reply) of rated replies; they give
    words their names, because the model keeps only hashes."""
    if ratings < MIN_RATINGS:
        return []
    names, found = _names(fit, rated), []
    for column in dict.fromkeys((*(Column(measure=m) for m in range(M)), *fit.columns)):
        stars, sure = _effect(fit, column)
        words = _column_in_words(column, stars, names)
        if words and abs(sure) >= SURE and abs(stars) >= FELT:
            found.append(Liking(words, abs(stars), abs(sure)))
    return sorted(found, key=lambda p: -p.stars)[:MOST_SAID]


def sentence(found: Sequence[Liking]) -> str:
    """Empty if the ratings support nothing yet."""
    return ", ".join(preference.words for preference in found)


def _effect(fit: TasteFit, column: Column) -> tuple[float, float]:
    """(stars, standard deviations from zero) of a column and, within one kind of question, of the same
    measure in all questions."""
    counted = np.zeros(1 + M + len(fit.columns))
    if column.measure is not None:
        counted[1 + column.measure] = 1
    for at, other in enumerate(fit.columns):
        same = (other.measure, other.word) == (column.measure, column.word)
        counted[1 + M + at] = same and other.opener in (None, column.opener)
    stars = float(counted @ fit.posterior.mean)
    return stars, stars / float(np.sqrt(counted @ fit.posterior.covariance @ counted))


def _column_in_words(column: Column, stars: float, names: dict[int, str]) -> str:
    """The column in words; empty if it is about questions alone, or if its word is in none of the texts."""
    if column.measure is not None:
        measure = MEASURES[column.measure]
        words = measure.more if stars > 0 else measure.less
    elif column.word is not None and column.word in names:
        words = ("" if stars > 0 else "no ") + f"'{names[column.word]}'"
    else:
        return ""
    if column.opener is None:
        return words
    opener = names.get(column.opener)
    return f"{words} in questions with '{opener}'" if opener else ""


def _names(fit: TasteFit, rated: Sequence[tuple[str, str]]) -> dict[int, str]:
    """Words by their hashes, as far as the fit's columns have any."""
    wanted = {h for c in fit.columns for h in (c.word, c.opener) if h is not None}
    if not wanted:
        return {}
    found: dict[int, str] = {}
    for question, reply in rated:
        for gram in (opener_of(question), *grams(reply)):
            if (hashed := bucket(gram)) in wanted:
                found.setdefault(hashed, gram)
    return found
