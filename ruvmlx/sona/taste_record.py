"""This module tests how well the taste model (taste.py) predicts the ratings of its user. The module compares
each rating with the prediction of a model that was fitted only to earlier ratings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .taste import NEUTRAL, STARS, RatedFeatures, TasteModel

GROWTH = 20  # the taste model is fitted again if the number of ratings has grown by more than 1 / GROWTH


@dataclass(frozen=True)
class PredictedRating:
    """A rating and its prediction.

    given: the number of stars of the rating
    predicted, sd: the mean and the standard deviation of the predicted stars; the taste model was fitted only
        to earlier ratings
    usual: the mean of all earlier ratings in stars (NEUTRAL for the first rating), for comparison with
        `predicted`
    """

    reply_id: str
    rating: str
    given: float
    predicted: float
    sd: float
    usual: float


@dataclass(frozen=True)
class TasteRecord:
    """All ratings with their predictions, the oldest first.

    error: the mean absolute error of the predictions, in stars
    usual_error: the mean absolute error, in stars, of the mean of the earlier ratings as a prediction
    correlation: the correlation of predicted and given stars; None for fewer than three ratings, or if the
        predicted or the given stars never vary
    """

    ratings: tuple[PredictedRating, ...]

    @property
    def error(self) -> float | None:
        return self._mean([abs(r.given - r.predicted) for r in self.ratings])

    @property
    def usual_error(self) -> float | None:
        return self._mean([abs(r.given - r.usual) for r in self.ratings])

    @property
    def correlation(self) -> float | None:
        pairs = np.array([(r.given, r.predicted) for r in self.ratings]).reshape(-1, 2)
        if len(pairs) < 3 or pairs.std(axis=0).min() < 1e-9:
            return None
        return float(np.corrcoef(pairs.T)[0, 1])

    @staticmethod
    def _mean(values: Sequence[float]) -> float | None:
        return float(np.mean(values)) if values else None


def predicted_before(rated: Sequence[tuple[str, RatedFeatures]]) -> TasteRecord:
    """Predict each rating from earlier ratings, and return the ratings with their predictions. The taste
    model that predicts a rating is never fitted to that rating, and can lack the newest earlier ratings
    (GROWTH). Replies without a rating are left out, because the store does not know when the user saw them.

    rated: (reply id, rating with the features of the reply), the oldest first, each reply once
    """
    ratings = [rating for _, rating in rated]
    given = np.array([STARS[r.rating] for r in ratings])
    found, model, seen = [], TasteModel.fit([]), 0
    for at, (reply_id, rating) in enumerate(rated):
        if at - seen > seen // GROWTH:
            model, seen = TasteModel.fit(ratings[:at]), at
        mean, sd = (float(values[0]) for values in model.predict_rated([rating]))
        usual = float(given[:at].mean()) if at else NEUTRAL
        found.append(PredictedRating(reply_id, rating.rating, float(given[at]), mean, sd, usual))
    return TasteRecord(tuple(found))
