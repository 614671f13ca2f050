"""From a user's ratings, the taste model predicts the stars that the user would give to any reply, and the
uncertainty of these stars.

The model is a Bayesian linear regression in stars,

    y = f(reply) w + noise,   w_k ~ N(0, a_k),   noise ~ N(0, s)

Its columns f are an intercept, all measures of the text (taste_measures.py), of which few matter to one user
(a spike-and-slab prior, taste_evidence.py), and a few columns that the ratings select. Such a column is a
word's count, or a measure that applies only to questions with a certain first word. Variances and columns are
chosen by the evidence p(y). So with ten ratings, no column is selected that could be chance, and with a
hundred ratings, a favourite phrase is found. (MacKay 1992; Tipping & Faul 2003)

A preference is a row of the regression, too. Its columns are the differences of the two replies' columns, so
the intercept cancels, and its y is GAP stars. For preferences, this is a Bradley-Terry model with a linear
link instead of a logistic link.

Replies differ most by their questions. One user wants "at most 80 words" for every question. Another user
compares replies, and says "this reply is long for this question". To see the second kind of wish, the model
needs the measures of other replies to the question, which the user did not see (unshown.py). The evidence
says how probable it is that the user compares. With this probability as a factor, the mean of the unshown
replies' measures is subtracted from a reply's measures.

The fitted model depends only on the list of ratings in force. After an undo it is fitted to the ratings that
remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .taste_columns import design
from .taste_features import ReplyFeatures
from .taste_fit import M, Rows, TasteFit, fit, log_evidence_of_measures, missing_side, with_background
from .taste_words import Liking, guess, preferences, sentence

STARS = {"up": 4.5, "down": 1.5} | {str(n): float(n) for n in range(1, 6)}
# The variance inside one rating: a star is a rounded number, and a thumb can mean one of two stars.
_STAR, _THUMB = 1 / 12, 4 / 12
NEUTRAL = 3.0
MAX_RATINGS = 1000  # the maximum number of ratings that are used
GAP = 2.0  # y of a preference: the better reply leads by this many stars
COMPARES = 2.0  # prior log-odds that a user compares a reply with other replies to its question
ROOT_STEP = 0.5  # one more use of a word raises the root of its count by about 0.5; exactly 1, 0.4, 0.3 ..
# If unrated replies are used, too, this many of them must have unshown replies before replies are compared.
MIN_COMPARED = 8
PAIR = 0.5  # the weight of a preference, in ratings, because it has the noise of two replies


@dataclass(frozen=True)
class RatedFeatures:
    """The features of a reply that the user saw. rating: "up", "down" or "1" to "5"; "" if the user did not
    rate the reply. unshown: [U, M], the M measures of U other replies to the question, which the user did not
    see; None if there are no such replies."""

    features: ReplyFeatures
    rating: str
    unshown: np.ndarray | None = None

    def features_from(self, share: float) -> ReplyFeatures:
        """Return the features, with `share` times the mean measures of the unshown replies subtracted from
        the measures."""
        usual = 0.0 if self.unshown is None else np.float32(share) * self.unshown.mean(axis=0)
        return replace(self.features, measures=self.features.measures - usual)


@dataclass(frozen=True)
class PreferredFeatures:
    """A preference between two replies to one question. strength: 1 for a clear preference. is_reason: True
    if the preference is the reason for a rating (taste_reasons.py) and not separate feedback."""

    better: ReplyFeatures
    worse: ReplyFeatures
    strength: float = 1.0
    is_reason: bool = False


Given = RatedFeatures | PreferredFeatures


def background_counts(given: Sequence[Given]) -> bool:
    """Return True if unrated replies are evidence, too. This is so if nearly all ratings are up or nearly all
    are down."""
    rated = [STARS[one.rating] - NEUTRAL for one in given if isinstance(one, RatedFeatures)]
    return missing_side(np.array(rated)) > 0


def _rows(given: Sequence[Given], share: float) -> Rows:
    rows = [_row(one, share) for one in given]
    thumbs = [not one.rating.isdigit() for one in given if isinstance(one, RatedFeatures)]
    coarse = _STAR + sum(thumbs) / max(1, len(thumbs)) * (_THUMB - _STAR)
    return Rows(
        [reply for reply, *_ in rows],
        np.array([y for _, _, y, _ in rows]),
        np.array([weight for *_, weight in rows]),
        [worse for _, worse, _, _ in rows],
        coarse,
    )


def _row(one: Given, share: float) -> tuple[ReplyFeatures, ReplyFeatures | None, float, float]:
    """Return (reply, worse reply or None, y, weight) of a rating or preference."""
    if isinstance(one, RatedFeatures):
        return one.features_from(share), None, STARS[one.rating] - NEUTRAL, 1.0
    return one.better, one.worse, GAP, PAIR * one.strength


def _probability_of_comparing(given: Sequence[Given], background: Sequence[RatedFeatures]) -> float:
    """Return the probability that the user compares a reply with other replies to its question; 0 if there
    are no unshown replies."""
    if not any(isinstance(one, RatedFeatures) and one.unshown is not None for one in given):
        return 0.0
    fixed, compared = (
        log_evidence_of_measures(with_background(_rows(given, share), _features(background, share)))
        for share in (0.0, 1.0)
    )
    return float(1 / (1 + np.exp(np.clip(fixed - compared - COMPARES, -50, 50))))


def _features(background: Sequence[RatedFeatures], share: float) -> list[ReplyFeatures]:
    return [one.features_from(share) for one in background]


@dataclass(frozen=True)
class TokenWeights:
    """The weights of the columns that apply to all questions.

    mean: [K], covariance: [K, K]: the stars by which a rating rises if a measure (`measure_text`) rises by 1,
        or if the reply has a word once more
    words: [K], the hashes of the words; -1 for the measures, which come before the words
    """

    mean: np.ndarray
    covariance: np.ndarray
    words: np.ndarray


@dataclass(frozen=True)
class TasteModel:
    """A fitted taste model. `fit` makes a model, which is immutable.

    ratings: the number of ratings and preferences in the fit
    share: the factor of the unshown replies' mean measures, which are subtracted from a reply's measures
    """

    ratings: int
    fitted: TasteFit
    share: float = 0.0

    @classmethod
    def fit(cls, given: Sequence[Given], background: Sequence[RatedFeatures] = ()) -> "TasteModel":
        """Fit a model.

        given: ratings and preferences, oldest first
        background: replies that the user saw and did not rate
        """
        given = given[-MAX_RATINGS:]
        count = sum(isinstance(one, RatedFeatures) or not one.is_reason for one in given)
        compared = [one for one in background if one.unshown is not None]
        if background and len(compared) < min(MIN_COMPARED, len(background)):
            share = 0.0  # replies are compared only if unrated replies can be compared, too
        else:
            background, share = compared, _probability_of_comparing(given, compared)
        return cls(count, fit(_rows(given, share), _features(background, share)), share)

    def predict(self, replies: Sequence[ReplyFeatures]) -> tuple[np.ndarray, np.ndarray]:
        """Return (mean, standard deviation) [R] of the stars that the user would give."""
        mean, variance = self.fitted.posterior.predict(
            design(replies, self.fitted.columns, self.fitted.scale)
        )
        return NEUTRAL + mean, np.sqrt(variance)

    def predict_rating(self, one: RatedFeatures) -> tuple[float, float]:
        """Return (mean, standard deviation) of the stars of a rated reply."""
        mean, deviation = self.predict([one.features_from(self.share)])
        return float(mean[0]), float(deviation[0])

    @property
    def has_words(self) -> bool:
        """True if a selected column is about a word, which can be named only from the texts of replies."""
        return any(c.word is not None or c.opener is not None for c in self.fitted.columns)

    @property
    def turned(self) -> int:
        """The number of ratings before the newest turn of the taste, which the model no longer uses; 0 if the
        taste never turned. A turn is a point at which the user's taste changed."""
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
        """Return the likings that the ratings support, the strongest first. rated: (question, reply) of rated
        replies, which give words their names. Without `rated`, only measures are named."""
        return preferences(self.fitted, rated)

    def guess(self) -> str:
        """Return in words the liking to which the ratings point most, even if it is not clear; "" if the
        ratings point to none."""
        return guess(self.fitted)

    def explain(self, rated: Sequence[tuple[str, str]] = ()) -> str:
        """Return the preferences as a sentence for people; "" if the ratings support no preference."""
        return sentence(self.preferences(rated))
