"""This module chooses the coefficients of the style basis (style_basis.py) from a user's ratings. The module
also chooses the size of the change of weights.

The coefficients are the weights w that the taste model gives to the measures of a reply. A small change with
these coefficients raises measure j by (R w)_j, where R is the basis's response, and the predicted stars by
w^T R w. The taste is uncertain, so the size of the change follows the lower bound of the gain in stars. If a
user's ratings say little, the weights hardly change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..taste import GAP, NEUTRAL, STARS, Given, RatedFeatures, TasteModel
from ..taste_fit import M
from ..taste_measures import MEASURES
from .style_basis import StyleBasis

DOUBT = 0.5  # the lower bound of the gain in stars is the expected gain minus DOUBT standard deviations
# `agreement` divides the ratings into parts. FOLDS is the maximum number of parts, and the minimum is two.
# PART is the usual minimum number of ratings in a part.
FOLDS, PART = 5, 4

_NAMES = [measure.more for measure in MEASURES]
_LENGTH, _COMPLETE = _NAMES.index("longer replies"), _NAMES.index("complete replies")


@dataclass(frozen=True)
class StyleChoice:
    """The choice of a style for one user.

    coefficients: [M], the coefficients of the M directions; only their ratios have a meaning
    confidence: from 0 (it is not clear that the user has a taste) to 1 (the taste is certain). The KL of
        the style is proportional to the confidence.
    """

    coefficients: np.ndarray
    confidence: float

    @property
    def likes_longer(self) -> bool:
        """True if the user likes longer replies."""
        return float(self.coefficients[_LENGTH]) > 0

    @classmethod
    def of(cls, taste: TasteModel, basis: StyleBasis, ends: float = 0.0) -> "StyleChoice":
        """Return the choice for a taste.

        ends: the share of END_KL (taste_push.py) that the change of end-of-reply tokens uses. This change
            already makes replies longer or shorter. So the style changes the length only by the part
            1 - ends, and not at all if the share is above 1.
        """
        weights = taste.token_weights()
        mean, covariance = weights.mean[:M], weights.covariance[:M, :M]
        wanted = mean.copy()
        wanted[_LENGTH] *= max(0.0, 1 - ends)
        chosen = wanted if mean[_LENGTH] > 0 else _with_ends(wanted, basis.response)
        rise = basis.response @ chosen
        gain, doubt = float(mean @ rise), DOUBT * float(np.sqrt(max(0.0, rise @ covariance @ rise)))
        return cls(chosen, max(0.0, 1 - doubt / gain) if gain > 0 else 0.0)


def _with_ends(coefficients: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Return the coefficients [M], changed so that replies do not become less complete. Directions of other
    measures also move this measure, and replies that do not end are faults (faults.py)."""
    lost, per_unit = (
        min(0.0, float(response[_COMPLETE] @ coefficients)),
        float(response[_COMPLETE, _COMPLETE]),
    )
    if lost == 0 or per_unit <= 0:
        return coefficients
    changed = coefficients.copy()
    changed[_COMPLETE] -= lost / per_unit
    return changed


def agreement(given: Sequence[Given], background: Sequence[RatedFeatures]) -> float:
    """Return the covariance of ratings and their predictions, divided by its standard error. The result is
    above 0 if a taste model predicts ratings to which it was not fitted. With unrated replies, their mean
    prediction replaces the mean prediction of the ratings.

    given: the ratings and preferences
    background: unrated replies, if nearly all ratings are up or nearly all ratings are down; else empty
    """
    stars = np.array([_stars(one) for one in given])
    rated = np.array([isinstance(one, RatedFeatures) for one in given])
    products = np.zeros(len(given))
    folds = max(2, min(FOLDS, len(given) // PART))
    for fold in range(folds):
        model = TasteModel.fit([one for i, one in enumerate(given) if i % folds != fold], background)
        part = np.arange(fold, len(given), folds)
        predicted = np.array([_predicted_stars(model, given[i]) for i in part.tolist()])
        if background:
            usual = np.array([float(model.predict_rated(background)[0].mean() - NEUTRAL), 0.0])
        else:
            # The mean of the other parts is a prediction, too, and it is high if this part's stars are low.
            # So subtract the means of this part.
            both = np.stack([predicted, stars[part]])[:, rated[part]]
            usual = both.mean(axis=1) if both.size else np.zeros(2)
        products[part] = (predicted - rated[part] * usual[0]) * (stars[part] - rated[part] * usual[1])
    return float(products.mean() / max(products.std() / np.sqrt(len(products)), 1e-9))


def _stars(one: Given) -> float:
    return STARS[one.rating] - NEUTRAL if isinstance(one, RatedFeatures) else GAP * one.strength


def _predicted_stars(model: TasteModel, one: Given) -> float:
    if isinstance(one, RatedFeatures):
        return float(model.predict_rated([one])[0][0]) - NEUTRAL
    better, worse = model.predict([one.better, one.worse])[0]
    return float(better - worse)
