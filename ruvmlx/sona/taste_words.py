"""This module says in words which likings of a user the taste model (taste.py) has found, for example
"shorter replies, more 'you', lists in questions with 'how'"."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .taste_clear import clear_columns
from .taste_columns import Column
from .taste_features import bucket, grams, opener_of
from .taste_fit import M, Rows, TasteFit
from .taste_measures import MEASURES

FELT = 0.2  # the minimum effect of a liking, in stars, if its column of the taste model rises by 1
MOST_SAID = 4  # the maximum number of likings in a sentence
POINTS = 1.0  # the minimum effect of a guessed liking, in standard deviations of the effect


@dataclass(frozen=True)
class Liking:
    """A liking of the user: a property of replies that the user rates higher.

    words: the property in words
    stars: the effect on the rating if the property's column of the taste model rises by 1
    sure: the effect divided by its standard deviation
    """

    words: str
    stars: float
    sure: float


def preferences(fit: TasteFit, rows: Rows, rated: Sequence[tuple[str, str]]) -> list[Liking]:
    """Return the likings (at most MOST_SAID) that the ratings show clearly, the strongest first.

    rows: the rows to which the taste model was fitted
    rated: (question, reply) texts of rated replies. The names of words come from these texts, because the
        taste model keeps only hashes of words.
    """
    names, found = _names(fit, rated), []
    for clear in clear_columns(rows, fit.scale, MOST_SAID):
        stars, sure = _effect(fit, clear.column)
        words = _column_in_words(clear.column, clear.correlation, names)
        if words and stars * clear.correlation > 0 and abs(stars) >= FELT:
            found.append(Liking(words, abs(stars), abs(sure)))
    return sorted(found, key=lambda p: -p.stars)


def guess(fit: TasteFit) -> str:
    """Return in words which measure the user most probably likes, even if the evidence is not clear; "" if no
    measure's effect is POINTS standard deviations from zero."""
    effects = [(k, *_effect(fit, Column(measure=k))) for k in range(M)]
    k, stars, sure = max(effects, key=lambda one: abs(one[2]))
    words = MEASURES[k].more if stars > 0 else MEASURES[k].less
    return words if abs(sure) >= POINTS else ""


def sentence(found: Sequence[Liking]) -> str:
    """Return the likings as one sentence; "" if there are no likings."""
    return ", ".join(preference.words for preference in found)


def _effect(fit: TasteFit, column: Column) -> tuple[float, float]:
    """Return the effect of a column on the rating: (stars, the number of standard deviations from zero). If
    the column applies only to questions with a certain first word, the effect of the same measure or word in
    all questions is added."""
    counted = np.zeros(1 + M + len(fit.columns))
    if column.measure is not None:
        counted[1 + column.measure] = 1
    for at, other in enumerate(fit.columns):
        same = (other.measure, other.word) == (column.measure, column.word)
        counted[1 + M + at] = same and other.opener in (None, column.opener)
    stars = float(counted @ fit.posterior.mean)
    spread = float(np.sqrt(counted @ fit.posterior.covariance @ counted))
    return stars, stars / max(spread, 1e-9)  # both numbers are 0 if the fit has no such column


def _column_in_words(column: Column, sign: float, names: dict[int, str]) -> str:
    """Return in words what the user likes about a column; "" if the column is only about questions, or if
    `names` does not have the column's word or first word. sign: above 0 if the user likes a large value of
    the column, below 0 if a small value."""
    if column.measure is not None:
        measure = MEASURES[column.measure]
        words = measure.more if sign > 0 else measure.less
    elif column.word is not None and column.word in names:
        words = ("" if sign > 0 else "no ") + f"'{names[column.word]}'"
    else:
        return ""
    if column.opener is None:
        return words
    opener = names.get(column.opener)
    return f"{words} in questions with '{opener}'" if opener else ""


def _names(fit: TasteFit, rated: Sequence[tuple[str, str]]) -> dict[int, str]:
    """Return {hash: word} of the words and first words in the fit's columns. A word is missing if it is not
    in the texts `rated`."""
    wanted = {h for c in fit.columns for h in (c.word, c.opener) if h is not None}
    if not wanted:
        return {}
    found: dict[int, str] = {}
    for question, reply in rated:
        for gram in (opener_of(question), *grams(reply)):
            if (hashed := bucket(gram)) in wanted:
                found.setdefault(hashed, gram)
    return found
