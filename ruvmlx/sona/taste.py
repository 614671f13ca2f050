"""This module is the taste model. From a user's ratings, the taste model predicts the stars that the user
would give to any reply, and the uncertainty of these stars.

The model is a Bayesian linear regression in stars,
    y = f(reply) w + noise,   w_k ~ N(0, a_k),   noise ~ N(0, s)

The columns f are an intercept, all measures of the reply's text (taste_measures.py), and a few columns that
the ratings select. The prior says that only few measures matter to one user (a spike-and-slab prior,
taste_evidence.py). A selected column is the square root of a word's count, or a constant or a measure that
applies only to questions with a certain first word. The evidence p(y) (the probability of the ratings under
the model) chooses the variances and the columns. So with ten ratings, the model hardly ever selects a column,
because a column can fit by chance; with a hundred ratings, it can find a favourite phrase (MacKay 1992;
Tipping & Faul 2003).

A preference between two replies is a row of the regression, too. The columns of a preference's row are the
differences of the two replies' columns, so the intercept cancels. The value y of a preference's row is GAP
stars. For preferences, the regression is a Bradley-Terry model with a linear instead of a logistic link
function.

Most of the difference between replies comes from their questions. One user wants "at most 80 words" for every
question. Another user compares a reply with what is usual for its question, and says "this reply is long for
this question". To learn whether a user compares replies in this way, the model needs the measures of unshown
replies (other replies to the question, which the user did not see; unshown.py). The evidence gives the
probability that the user compares replies. This probability is a factor: the factor times the mean of the
unshown replies' measures is subtracted from a reply's measures.

The fitted model depends on the ratings in force (not taken back) and on the unrated and unshown replies, but
not on ratings that were taken back. After an undo, the model is fitted to the ratings that remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .taste_columns import design
from .taste_features import ReplyFeatures, ReplyTable
from .taste_fit import M, Rows, TasteFit, fit, log_evidence_of_measures, missing_side, with_background
from .taste_words import Liking, guess, preferences

STARS = {"up": 4.5, "down": 1.5} | {str(n): float(n) for n in range(1, 6)}
# The minimum noise variance (squared stars) of a rating. A number of stars is rounded, and a thumb (up or
# down) can mean one of two numbers of stars.
_STAR, _THUMB = 1 / 12, 4 / 12
NEUTRAL = 3.0  # the neutral number of stars
MAX_RATINGS = 1000  # the maximum number of ratings in a fit; only the newest ratings are used
GAP = 2.0  # y of a preference: the better reply gets this many stars more than the worse reply
COMPARES = 2.0  # the prior log-odds that a user compares a reply with other replies to its question
ROOT_STEP = 0.5  # one more use of a word raises the root of its count by 1, 0.4, 0.3 ..: about 0.5
# The minimum number of unrated replies with unshown replies (or all unrated replies, if they are fewer). If
# fewer unrated replies have unshown replies, a fit with unrated replies compares no replies.
MIN_COMPARED = 8
MAX_SHORTER = 3
PAIR = 0.5  # the weight of a preference, in ratings; it is below 1, because two replies have twice the noise


@dataclass(frozen=True, slots=True)
class RatedFeatures:
    """The features of a reply that the user saw.

    rating: "up", "down" or "1" to "5"; "" if the user did not rate the reply
    usual: [M], the mean of each measure over the unshown replies (other replies to the question, which the
        user did not see); None if there are no unshown replies
    """

    features: ReplyFeatures
    rating: str
    usual: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PreferredFeatures:
    """A preference between two replies to one question.

    strength: 1 for a clear preference
    is_reason: True if the preference is the reason for a rating (taste_reasons.py) and not separate feedback
    shorter: 1 if the reason is that the reply is too long, -1 if it is too short, else 0
    """

    better: ReplyFeatures
    worse: ReplyFeatures
    strength: float = 1.0
    is_reason: bool = False
    shorter: int = 0


Given = RatedFeatures | PreferredFeatures


def background_counts(given: Sequence[Given]) -> bool:
    """Return True if unrated replies are evidence of the taste, too, because nearly all ratings are up or
    nearly all ratings are down."""
    rated = [STARS[one.rating] - NEUTRAL for one in given if isinstance(one, RatedFeatures)]
    return missing_side(np.array(rated)) > 0


def _rows(given: Sequence[Given], share: float) -> Rows:
    rows = [_row(one) for one in given]
    thumbs = [not one.rating.isdigit() for one in given if isinstance(one, RatedFeatures)]
    coarse = _STAR + sum(thumbs) / max(1, len(thumbs)) * (_THUMB - _STAR)
    return Rows(
        features_within_question([reply for reply, *_ in rows], share),
        np.array([y for *_, y, _ in rows]),
        np.array([weight for *_, weight in rows]),
        [worse for _, worse, *_ in rows],
        coarse,
    )


def _row(one: Given) -> tuple[RatedFeatures, ReplyFeatures | None, float, float]:
    """Return one row of the regression, from a rating or a preference: (the rated or better reply, the
    features of the worse reply or None, y, weight)."""
    if isinstance(one, RatedFeatures):
        return one, None, STARS[one.rating] - NEUTRAL, 1.0
    return RatedFeatures(one.better, ""), one.worse, GAP, PAIR * one.strength


def features_within_question(replies: Sequence[RatedFeatures], share: float) -> ReplyTable:
    """Return the features of the replies after a subtraction: the measures of each reply minus `share` times
    the mean measures of the unshown replies."""
    table = ReplyTable.of([one.features for one in replies])
    measures = table.measures.copy()
    for row, one in zip(measures, replies, strict=True):
        if one.usual is not None:
            row -= np.float32(share) * one.usual
    return replace(table, measures=measures)


def _shorter(given: Sequence[Given]) -> int:
    """Return a count of the reasons about the length, in the order of the ratings. Each reason "too long"
    adds 1, and each reason "too short" subtracts 1. After each step, the count is limited to the range from
    -MAX_SHORTER to MAX_SHORTER. So one "too short" lowers the count even after many "too long"."""
    total = 0
    for one in given:
        if isinstance(one, PreferredFeatures):
            total = min(MAX_SHORTER, max(-MAX_SHORTER, total + one.shorter))
    return total


def _probability_of_comparing(given: Sequence[Given], background: Sequence[RatedFeatures]) -> float:
    """Return the probability that the user compares a reply with other replies to its question; 0 if no rated
    reply has unshown replies."""
    if not any(isinstance(one, RatedFeatures) and one.usual is not None for one in given):
        return 0.0
    fixed, compared = (
        log_evidence_of_measures(
            with_background(_rows(given, share), features_within_question(background, share))
        )
        for share in (0.0, 1.0)
    )
    return float(1 / (1 + np.exp(np.clip(fixed - compared - COMPARES, -50, 50))))


def _background_of_fit(background: Sequence[RatedFeatures]) -> tuple[Sequence[RatedFeatures], bool]:
    """Return the unrated replies that a fit uses, and True if the fit can compare replies. If enough unrated
    replies have unshown replies, the fit uses only these unrated replies. Else the fit uses all unrated
    replies, and compares no replies."""
    compared = [one for one in background if one.usual is not None]
    if background and len(compared) < min(MIN_COMPARED, len(background)):
        return background, False
    return compared, True


@dataclass(frozen=True)
class TokenWeights:
    """The weights that the taste model gives to K measures and words of a reply. The weights are means over
    the rated questions. Some weights apply only to questions that begin with a certain word, such as "how".
    The program multiplies such a weight by the share of the rated questions that begin with the word.

    mean, covariance: [K] and [K, K], the number of stars by which a rating rises if a measure
        (`measure_text`) rises by 1, or if the reply has a word once more
    words: [K], the hash of each word; -1 for each measure; the measures come first
    """

    mean: np.ndarray
    covariance: np.ndarray
    words: np.ndarray


@dataclass(frozen=True)
class TasteModel:
    """A fitted taste model. The function `fit` makes the model, and the model does not change after the fit.

    ratings: the number of ratings and preferences in the fit
    share: the factor of the unshown replies' mean measures, which are subtracted from a reply's measures
    shorter: how much shorter replies the user asks for by reasons (`_shorter`)
    """

    ratings: int
    fitted: TasteFit
    share: float = 0.0
    shorter: int = 0

    @classmethod
    def fit(cls, given: Sequence[Given], background: Sequence[RatedFeatures] = ()) -> "TasteModel":
        """Fit a taste model, and return the model.

        given: ratings and preferences, the oldest first
        background: replies that the user saw and did not rate
        """
        given = given[-MAX_RATINGS:]
        count = sum(isinstance(one, RatedFeatures) or not one.is_reason for one in given)
        background, can_compare = _background_of_fit(background)
        share = _probability_of_comparing(given, background) if can_compare else 0.0
        fitted = fit(_rows(given, share), features_within_question(background, share))
        return cls(count, fitted, share, _shorter(given))

    def predict(self, replies: Sequence[ReplyFeatures] | ReplyTable) -> tuple[np.ndarray, np.ndarray]:
        """Return (mean, standard deviation) of the stars that the user would give to each of R replies: [R]
        each."""
        mean, variance = self.fitted.posterior.predict(
            design(replies, self.fitted.columns, self.fitted.scale)
        )
        return NEUTRAL + mean, np.sqrt(variance)

    def predict_gain(
        self, after: Sequence[ReplyFeatures], before: Sequence[ReplyFeatures]
    ) -> tuple[float, float]:
        """Return (mean, standard deviation) of the gain in stars from the replies `before` to the replies
        `after`: the difference of the mean predicted stars. The standard deviation says how well the ratings
        determine the weights of the taste that the gain depends on."""
        columns, scale, posterior = self.fitted.columns, self.fitted.scale, self.fitted.posterior
        old, new = (design(of, columns, scale).mean(axis=0) for of in (before, after))
        variance = (new - old) @ posterior.covariance @ (new - old)
        return float((new - old) @ posterior.mean), float(np.sqrt(max(0.0, variance)))

    def predict_rated(self, rated: Sequence[RatedFeatures]) -> tuple[np.ndarray, np.ndarray]:
        """Return the predicted (mean, standard deviation) of the stars of R replies that the user saw: [R]
        each."""
        return self.predict(features_within_question(rated, self.share))

    @property
    def has_words(self) -> bool:
        """True if a selected column is about a word. The model has only hashes of words, so the word's name
        must come from the texts of replies."""
        return any(c.word is not None or c.opener is not None for c in self.fitted.columns)

    @property
    def ratings_before_turn(self) -> int:
        """The number of ratings before the newest turn of the taste; 0 if the taste never turned. A turn is a
        rating at which the user's taste changed. The model's weights are not fitted to the ratings before the
        turn, which only suggest columns."""
        return self.fitted.turned

    def token_weights(self) -> TokenWeights:
        fit = self.fitted
        which = [k for k, column in enumerate(fit.columns) if column.opener is None]
        own = {k: M + at for at, k in enumerate(k for k in which if fit.columns[k].word is not None)}
        total = np.zeros((M + len(own), fit.posterior.mean.size))
        total[:M, 1 : 1 + M] = np.diag(1 / fit.scale.spread)
        for k, column in enumerate(fit.columns):
            if column.measure is not None:
                total[column.measure, 1 + M + k] = fit.shares[k] / fit.scale.spread[column.measure]
        for k, row in own.items():
            total[row, 1 + M + k] = ROOT_STEP
        words = [fit.columns[k].word for k in own]
        return TokenWeights(
            total @ fit.posterior.mean,
            total @ fit.posterior.covariance @ total.T,
            np.array([-1] * M + words, np.int64),
        )

    def preferences(
        self,
        given: Sequence[Given],
        background: Sequence[RatedFeatures] = (),
        rated: Sequence[tuple[str, str]] = (),
    ) -> list[Liking]:
        """Return what the user likes by clear evidence of the ratings (at most MOST_SAID likings), the
        strongest liking first.

        given, background: the arguments of the fit. The model keeps no copy of the ratings, because the copy
            would make a server's memory grow with the ratings.
        rated: (question, reply) texts of rated replies, which give the names of words. Without these texts,
            only likings about measures are returned.
        """
        ratings = _rows(given[-MAX_RATINGS:], self.share)[self.ratings_before_turn :]
        unrated = features_within_question(_background_of_fit(background)[0], self.share)
        return preferences(self.fitted, with_background(ratings, unrated), rated)

    def guess(self) -> str:
        """Return in words which measure of a reply the user most probably likes, even if the evidence is not
        clear; "" if the ratings point to nothing."""
        return guess(self.fitted)
