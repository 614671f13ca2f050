"""This module makes the columns of the taste model's regression (taste.py). The module also makes the
candidate columns; the taste model selects the candidates that explain the ratings best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .taste_features import BUCKETS, ReplyFeatures, ReplyTable
from .taste_measures import NAMED

MAX_SPREADS = 4.0  # the maximum distance of a measure from its centre, in spreads (standard deviations)
USUAL = 10  # the weight of the starter model's means and spreads in a scale, as a number of replies
SEEN = 3  # the minimum number of replies that have a candidate word or opener (a question's first word)
WORDS, OPENERS = 300, 6  # the maximum numbers of candidate words and openers; the most common are candidates

Replies = Sequence[ReplyFeatures] | ReplyTable


@dataclass(frozen=True)
class Column:
    """A column of the regression, which gives one number for each reply. A column's number is a measure, the
    square root of a word's count, or 1. If `opener` is set, the number is 0 unless the reply's question
    begins with that word.

    measure: an index in MEASURES; word: the hash of a word; opener: the hash of a question's first word
    """

    measure: int | None = None
    word: int | None = None
    opener: int | None = None

    def of(self, replies: ReplyTable, measures: np.ndarray, words: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return the values of this column for R replies: [R].

        measures: [R, M], the scaled measures of the replies
        words: {hash of a word: the square roots [R] of its counts in the replies}
        """
        if self.measure is not None:
            value = measures[:, self.measure]
        elif self.word is not None:
            value = words[self.word]
        else:
            value = np.ones(len(replies))
        if self.opener is None:
            return value
        return value * (replies.openers == self.opener)


@dataclass(frozen=True)
class Scale:
    """The mean and the spread of the M measures in this user's replies. Mean and spread are computed from the
    replies to which the taste model is fitted. Without this scale, all long replies of a user would be
    clipped to the same length.

    centre, spread: [M], the mean and the standard deviation of each measure
    """

    centre: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, replies: Replies) -> "Scale":
        """Return the scale of these replies together with USUAL imaginary replies. In the imaginary replies,
        each measure has the mean `usual` and the standard deviation `spread` of taste_measures.py. The spread
        of a measure is never smaller than its spread in taste_measures.py, because a measure that hardly
        varies says little."""
        found = ReplyTable.of(replies).measures.astype(np.float64)
        count = USUAL + len(found)
        centre = found.sum(axis=0) / count
        square = (USUAL + ((found - centre) ** 2).sum(axis=0)) / count
        return cls(centre, np.sqrt(np.maximum(square, 1)))

    def measures(self, replies: Replies) -> np.ndarray:
        """Return the scaled measures of R replies: [R, M] float64. Each measure is clipped to at most
        MAX_SPREADS spreads from its centre."""
        found = ReplyTable.of(replies).measures.astype(np.float64)
        return np.clip((found - self.centre) / self.spread, -MAX_SPREADS, MAX_SPREADS)


def design(replies: Replies, selected: Sequence[Column], scale: Scale) -> np.ndarray:
    """Return the design matrix of R replies: [R, 1 + M + K]. The columns of the matrix are an intercept, all
    M measures, and the K selected columns."""
    replies = ReplyTable.of(replies)
    measures = scale.measures(replies)
    words = list(dict.fromkeys(column.word for column in selected if column.word is not None))
    counted = dict(zip(words, roots(replies, words).T, strict=True)) if words else {}
    own = [column.of(replies, measures, counted) for column in selected]
    return np.column_stack([np.ones(len(replies)), measures, *own])


@dataclass(frozen=True)
class Candidates:
    """The C candidate columns.

    values: [R, C], the values of the columns for the R rows of the regression
    cost: [C], the log-evidence that each column must add to be selected
    """

    columns: list[Column]
    values: np.ndarray
    cost: np.ndarray
    scale: Scale

    @cached_property
    def squares(self) -> np.ndarray:
        return self.values * self.values

    @cached_property
    def places(self) -> dict[Column, int]:
        return {column: at for at, column in enumerate(self.columns)}


_ROOT = np.sqrt(np.arange(256, dtype=np.float32))

# The costs (Candidates.cost) of columns, for each kind of column. The more columns of a kind exist, the more
# log-evidence a column of this kind must add. A measure is never selected, because the model always has all
# measures.
_COSTS = {"measure": np.inf, "word": 6.0, "opener": 5.0, "both": 8.0}


def candidates(replies: Replies, scale: Scale) -> Candidates:
    replies = ReplyTable.of(replies)
    measures = scale.measures(replies)[:, :NAMED].astype(np.float32)
    words = _common_words(replies)
    openers = _common_openers(replies.openers)
    begins = (replies.openers[:, None] == np.array(openers, int)).astype(np.float32)
    both = (measures[:, :, None] * begins[:, None, :]).reshape(len(replies), measures.shape[1] * len(openers))
    kinds: dict[str, list[Column]] = {
        "measure": [Column(measure=m) for m in range(measures.shape[1])],
        "word": [Column(word=w) for w in words],
        "opener": [Column(opener=o) for o in openers],
        "both": [Column(measure=m, opener=o) for m in range(measures.shape[1]) for o in openers],
    }
    values = np.hstack([measures, roots(replies, words), begins, both])
    cost = np.repeat([_COSTS[kind] for kind in kinds], [len(columns) for columns in kinds.values()])
    return Candidates([column for columns in kinds.values() for column in columns], values, cost, scale)


def _common_words(replies: ReplyTable) -> list[int]:
    """Return the hashes of the WORDS most common words. A word is left out if fewer than SEEN replies have
    the word, or if all replies have the word."""
    seen = np.bincount(replies.words, minlength=BUCKETS)
    found = np.flatnonzero((seen >= SEEN) & (seen < len(replies)))
    return found[np.argsort(-seen[found], kind="stable")[:WORDS]].tolist()


def _common_openers(begun: np.ndarray) -> list[int]:
    values, counts = np.unique(begun, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:OPENERS]
    return [int(values[i]) for i in order if SEEN <= counts[i] < len(begun)]


def roots(replies: Replies, words: Sequence[int]) -> np.ndarray:
    """Return the square roots of the counts of W words in R replies: [R, W] float32. words: the words'
    hashes."""
    place = np.zeros(BUCKETS, np.int32)  # place[hash] is 0 if the hash is not in `words`
    place[list(words)] = np.arange(1, len(words) + 1)
    replies = ReplyTable.of(replies)
    found = np.zeros((len(replies), len(words) + 1), np.float32)
    at = place[replies.words]
    at += np.repeat(np.arange(len(replies), dtype=np.int32) * (len(words) + 1), replies.sizes)
    found.reshape(-1)[at] = _ROOT[replies.counts]
    return found[:, 1:]
