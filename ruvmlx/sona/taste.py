"""The taste model: from a user's ratings, it predicts the stars that the user would give to any reply, and
how uncertain they are.

It is a Bayesian linear regression in stars,

    y = f(reply) w + noise,   w_k ~ N(0, a_k),   noise ~ N(0, s)

Its columns f are an intercept, all measures of the text (taste_measures.py) with one prior variance, and a
few columns that the ratings select: a measure with its own variance, a word, a measure in questions that
begin with one word. Variances and columns are chosen by the evidence p(y). So ten ratings select nothing that
could be chance, and a hundred ratings find a favourite phrase. (MacKay 1992; Tipping & Faul 2003)

A preference is a row too: the difference of the two replies' columns, in which the intercept cancels, with y
    = GAP stars. This is a Bradley-Terry model with a linear link instead of the logistic one.

Replies differ most by their questions. So there is a second form of the model, if the measures of unshown
replies to the rated questions are known: measures are then counted from their mean. The form with the larger
evidence is used: the first for a user who wants "at most 80 words", the second for one who compares.

The model is a function of the list of ratings. After an undo it is fitted to the ratings that remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .taste_columns import design
from .taste_features import ReplyFeatures
from .taste_fit import M, Rows, TasteFit, fit, log_evidence_of_measures, missing_side
from .taste_words import Liking, guess, preferences, sentence

STARS = {"up": 4.5, "down": 1.5} | {str(n): float(n) for n in range(1, 6)}
# The variance inside one rating: a star is a rounded number, a thumb may mean either of two stars.
_STAR, _THUMB = 1 / 12, 4 / 12
NEUTRAL = 3.0
MAX_RATINGS = 1000  # the maximum number of ratings that are used
GAP = 2.0  # y of a preference: the better reply leads by this many stars
DOUBTED = 1.0  # a weight within this many standard deviations of zero does not push tokens
ROOT_STEP = 0.5  # one more of a word raises the root of its count by about this; exactly 1, 0.4, 0.3 ..
PAIR = 0.5  # the weight of a preference, in ratings: a difference has the noise of two replies


@dataclass(frozen=True)
class RatedFeatures:
    """A rated reply. rating: "up", "down" or "1" to "5". unshown: [U, M], the measures of other replies to
    its question, which the user did not see; None if there are none."""

    features: ReplyFeatures
    rating: str
    unshown: np.ndarray | None = None

    @property
    def relative_features(self) -> ReplyFeatures:
        """The features, with measures counted from the mean of the unshown replies."""
        return self.features if self.unshown is None else self._from_mean(self.features.measures)

    @property
    def relative_unshown(self) -> list[ReplyFeatures]:
        """The same for the unshown replies; they have no words."""
        return [] if self.unshown is None else [self._from_mean(one, words=False) for one in self.unshown]

    def _from_mean(self, measures: np.ndarray, words: bool = True) -> ReplyFeatures:
        assert self.unshown is not None
        features = replace(self.features, measures=measures - self.unshown.mean(axis=0))
        return features if words else replace(features, words=features.words[:0], counts=features.counts[:0])


@dataclass(frozen=True)
class PreferredFeatures:
    """Two replies to one question. strength: 1 for a clear preference. is_reason: whether it is the reason
    for a rating (taste_reasons.py) instead of separate feedback."""

    better: ReplyFeatures
    worse: ReplyFeatures
    strength: float = 1.0
    is_reason: bool = False


Given = RatedFeatures | PreferredFeatures


def background_counts(given: Sequence[Given]) -> bool:
    """Should unrated replies count as evidence, because nearly all ratings are up or nearly all are down?"""
    rated = [STARS[one.rating] - NEUTRAL for one in given if isinstance(one, RatedFeatures)]
    return missing_side(np.array(rated)) > 0


def _rows(given: Sequence[Given], is_relative: bool = False) -> Rows:
    rows = [_row(one, is_relative) for one in given]
    thumbs = [not one.rating.isdigit() for one in given if isinstance(one, RatedFeatures)]
    coarse = _STAR + sum(thumbs) / max(1, len(thumbs)) * (_THUMB - _STAR)
    return Rows(
        [reply for reply, *_ in rows],
        np.array([y for _, _, y, _ in rows]),
        np.array([weight for *_, weight in rows]),
        [worse for _, worse, _, _ in rows],
        coarse,
    )


def _row(one: Given, is_relative: bool) -> tuple[ReplyFeatures, ReplyFeatures | None, float, float]:
    """(reply, worse reply, y, weight)"""
    if isinstance(one, RatedFeatures):
        return one.relative_features if is_relative else one.features, None, STARS[one.rating] - NEUTRAL, 1.0
    return one.better, one.worse, GAP, PAIR * one.strength


@dataclass(frozen=True)
class TokenWeights:
    """The weights that hold for all questions.

    mean: [K], covariance: [K, K]: stars by which a reply's rating rises with each measure (as `measure_text`
        gives it) and with one more of each word
    words: [K], hashes of the words; -1 for the measures, which come first
    """

    mean: np.ndarray
    covariance: np.ndarray
    words: np.ndarray

    @property
    def shrunk(self) -> np.ndarray:
        """Return [K]: each weight, shrunk by its uncertainty; 0 below DOUBTED standard deviations."""
        doubt = DOUBTED**2 * np.diag(self.covariance) / np.maximum(self.mean**2, 1e-12)
        return self.mean * np.maximum(0, 1 - doubt)


@dataclass(frozen=True)
class TasteModel:
    """A fitted model; `fit` makes it. It is immutable.

    ratings: the number of ratings and preferences in the fit
    is_relative: whether measures are counted from the mean of unshown replies to the question
    """

    ratings: int
    fitted: TasteFit
    is_relative: bool = False

    @classmethod
    def fit(cls, given: Sequence[Given], background: Sequence[ReplyFeatures] = ()) -> "TasteModel":
        """Fit a model.

        given: ratings and preferences, oldest first
        background: replies that the user saw and did not rate
        """
        given = given[-MAX_RATINGS:]
        count = sum(isinstance(one, RatedFeatures) or not one.is_reason for one in given)
        rows = _rows(given)
        if any(isinstance(one, RatedFeatures) and one.unshown is not None for one in given):
            within = _rows(given, is_relative=True)
            if log_evidence_of_measures(within) > log_evidence_of_measures(rows):
                rated = (one for one in given if isinstance(one, RatedFeatures))
                unshown = [reply for one in rated for reply in one.relative_unshown]
                return cls(count, fit(within, unshown if background else ()), True)
        return cls(count, fit(rows, background))

    def predict(self, replies: Sequence[ReplyFeatures]) -> tuple[np.ndarray, np.ndarray]:
        """Return (mean, standard deviation) [R] of the stars that the user would give."""
        mean, variance = self.fitted.posterior.predict(
            design(replies, self.fitted.columns, self.fitted.scale)
        )
        return NEUTRAL + mean, np.sqrt(variance)

    def predict_rating(self, one: RatedFeatures) -> tuple[float, float]:
        """Return (mean, standard deviation) of the stars of a rated reply."""
        mean, deviation = self.predict([one.relative_features if self.is_relative else one.features])
        return float(mean[0]), float(deviation[0])

    @property
    def has_words(self) -> bool:
        """Is a column selected whose word can be named only from the texts of replies?"""
        return any(c.word is not None or c.opener is not None for c in self.fitted.columns)

    @property
    def turned(self) -> int:
        """The number of ratings before the newest turn of the taste, which no longer count; 0: the taste
        never turned."""
        return self.fitted.turned

    def token_weights(self) -> TokenWeights:
        fit = self.fitted
        which = [k for k, column in enumerate(fit.columns) if column.opener is None]
        own = {k: M + at for at, k in enumerate(k for k in which if fit.columns[k].word is not None)}
        total = np.zeros((M + len(own), fit.posterior.mean.size))
        total[:M, 1 : 1 + M] = np.diag(1 / fit.scale.spread)
        for k in which:
            measure = fit.columns[k].measure
            if measure is not None:
                total[measure, 1 + M + k] = 1 / fit.scale.spread[measure]
        for k, row in own.items():
            total[row, 1 + M + k] = ROOT_STEP
        words = [fit.columns[k].word for k in own]
        return TokenWeights(
            total @ fit.posterior.mean,
            total @ fit.posterior.covariance @ total.T,
            np.array([-1] * M + words, np.int64),
        )

    def preferences(self, rated: Sequence[tuple[str, str]] = ()) -> list[Liking]:
        """Return what the ratings support, the strongest first. rated: (question, reply) of rated replies,
        which give words their names; without them only measures are named."""
        return preferences(self.fitted, rated)

    def guess(self) -> str:
        """Return in words what the ratings point to most, clear or not; "" if they point nowhere."""
        return guess(self.fitted)

    def explain(self, rated: Sequence[tuple[str, str]] = ()) -> str:
        """Return the preferences as a sentence for people; "" if the ratings support none."""
        return sentence(self.preferences(rated))
