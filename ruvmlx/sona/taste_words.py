"""This module says in words which likings the taste model has found, for example "shorter replies, more
'you'; lists in questions with 'how'"."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .taste_clear import clear_columns
from .taste_columns import Column
from .taste_features import bucket, grams, opener_of
from .taste_fit import M, TasteFit
from .taste_measures import MEASURES

FELT = 0.2  # a liking must have at least this effect (stars) for a usual difference between two replies
MOST_SAID = 4
POINTS = 1.0  # a guess must be at least this many standard deviations from zero


@dataclass(frozen=True)
class Liking:
    """A liking of the user. stars: the effect of a usual difference between two replies. sure: the effect
    divided by its standard deviation."""

    words: str
    stars: float
    sure: float


def preferences(fit: TasteFit, rated: Sequence[tuple[str, str]]) -> list[Liking]:
    """Return the likings that the ratings show clearly, the strongest first. rated: (question, reply) of
    rated replies; the words are read from these texts, because the model keeps only hashes."""
    names, found = _names(fit, rated), []
    for clear in clear_columns(fit.rows, fit.scale, MOST_SAID):
        stars, sure = _effect(fit, clear.column)
        words = _column_in_words(clear.column, clear.correlation, names)
        if words and stars * clear.correlation > 0 and abs(stars) >= FELT:
            found.append(Liking(words, abs(stars), abs(sure)))
    return sorted(found, key=lambda p: -p.stars)


def guess(fit: TasteFit) -> str:
    """Return in words the liking to which the ratings point most, even if it is not clear; "" if no liking is
    POINTS standard deviations from zero."""
    effects = [(k, *_effect(fit, Column(measure=k))) for k in range(M)]
    k, stars, sure = max(effects, key=lambda one: abs(one[2]))
    words = MEASURES[k].more if stars > 0 else MEASURES[k].less
    return words if abs(sure) >= POINTS else ""


def sentence(found: Sequence[Liking]) -> str:
    """Return the preferences as a sentence; "" if there are no preferences."""
    return ", ".join(preference.words for preference in found)


def _effect(fit: TasteFit, column: Column) -> tuple[float, float]:
    """Return (stars, standard deviations from zero) of a column. For a measure in one kind of question, the
    effect of the same measure in all questions is added."""
    counted = np.zeros(1 + M + len(fit.columns))
    if column.measure is not None:
        counted[1 + column.measure] = 1
    for at, other in enumerate(fit.columns):
        same = (other.measure, other.word) == (column.measure, column.word)
        counted[1 + M + at] = same and other.opener in (None, column.opener)
    stars = float(counted @ fit.posterior.mean)
    spread = float(np.sqrt(counted @ fit.posterior.covariance @ counted))
    return stars, stars / max(spread, 1e-9)  # stars and spread are 0 for a word without a column


def _column_in_words(column: Column, sign: float, names: dict[int, str]) -> str:
    """Return the column in words; "" if the column is about questions alone, or if no text has the column's
    word."""
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
    """Return {hash: word} for the words of the fit's columns that are in the texts."""
    wanted = {h for c in fit.columns for h in (c.word, c.opener) if h is not None}
    if not wanted:
        return {}
    found: dict[int, str] = {}
    for question, reply in rated:
        for gram in (opener_of(question), *grams(reply)):
            if (hashed := bucket(gram)) in wanted:
                found.setdefault(hashed, gram)
    return found
