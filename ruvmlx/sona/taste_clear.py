"""This module decides which likings the ratings show clearly enough to tell the user. Each liking is about
one column of the taste model.

The model's own uncertainty is no good test. It is small after ten ratings that fit by chance, and the model
divides one taste among all columns that vary together. So each column's correlation with the ratings is
compared with the correlations of the same ratings after random shuffling. The threshold comes from the
largest correlation of all columns, so that many columns do not give more findings by chance (Westfall & Young
1993). A clear column is then removed from the ratings and from the other columns, so that one taste is found
only once.
"""

from dataclasses import dataclass

import numpy as np

from .taste_columns import Column, Scale
from .taste_fit import Rows

# The share of users with random ratings for whom nothing is found. At 0.95, most findings after ten ratings
# were wrong, because so few ratings show a real taste for fewer users than chance shows a false taste.
LEVEL = 0.99
_DEALS = 1000  # the number of shuffles; 10 of them are beyond the level
_FAMILIES = 2  # measures, and other columns (words, kinds of questions); each has half of 1 - LEVEL
# A column says the same as the clear columns if less than this share of its square remains without them.
_ALIKE = 0.1


@dataclass(frozen=True)
class ClearColumn:
    """A clear column. correlation: its correlation with the ratings after the clearer columns are removed; -1
    to 1."""

    column: Column
    correlation: float


def clear_columns(rows: Rows, scale: Scale, most: int) -> list[ClearColumn]:
    """Return up to `most` clear columns, the clearest first. A column must be clear on its own, and also
    after the columns found before it are removed."""
    if not len(rows.y):
        return []
    pool = rows.candidates(scale)
    family = np.array([c.measure is None or c.opener is not None for c in pool.columns], int)
    seen = _Evidence.of(rows, pool.values.astype(np.float64), family)
    correlation, is_clear = seen.clear()
    found: list[ClearColumn] = []
    while is_clear.any() and len(found) < most:
        best = int(np.argmax(np.where(is_clear, abs(correlation), 0)))
        found.append(ClearColumn(pool.columns[best], float(correlation[best])))
        seen = seen.without_column(best)
        correlation, still = seen.clear()
        is_clear = is_clear & still
    return found


@dataclass(frozen=True)
class _Evidence:
    """The columns and the ratings.

    x: [R, C], the C columns of the R rows
    signal: [R], the weighted stars
    dealt: [R, _DEALS], the same stars, shuffled
    whole: [C], the squares of the columns at the start
    family: [C], the family of each column, 0 or 1 (_FAMILIES)
    """

    x: np.ndarray
    signal: np.ndarray
    dealt: np.ndarray
    whole: np.ndarray
    family: np.ndarray

    @classmethod
    def of(cls, rows: Rows, x: np.ndarray, family: np.ndarray) -> "_Evidence":
        """Return the evidence, centred on the means. The row of a pair is a difference, so no mean is
        subtracted from it."""
        pairs = rows.pairs
        rated, y = np.delete(np.arange(len(rows.y)), pairs), rows.y.copy()
        if rated.size:
            y[rated] -= np.average(y[rated], weights=rows.weight[rated])
            x[rated] -= x[rated].mean(axis=0)
        # The fixed seed gives the same words for the same ratings.
        signal, rng = y * rows.weight, np.random.default_rng(0)
        dealt = np.repeat(signal[:, None], _DEALS, axis=1)
        dealt[rated] = rng.permuted(dealt[rated], axis=0)
        dealt[pairs] *= rng.choice((-1.0, 1.0), (len(pairs), _DEALS))
        return cls(x, signal, dealt, np.square(x).sum(axis=0), family)

    def without_column(self, column: int) -> "_Evidence":
        """Return the evidence after a column is removed from the ratings and from the other columns."""
        unit = self.x[:, column] / np.linalg.norm(self.x[:, column])
        x, signal, dealt = (
            values - np.multiply.outer(unit, unit @ values) for values in (self.x, self.signal, self.dealt)
        )
        return _Evidence(x, signal, dealt, self.whole, self.family)

    def clear(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the correlation [C] of each column with the ratings, and a mask [C] of the clear columns."""
        real = self._correlations(self.signal[:, None])[:, 0]
        chance, is_clear = abs(self._correlations(self.dealt)), np.zeros(len(real), bool)
        for family in range(_FAMILIES):
            of = self.family == family
            largest = np.sort(chance[of].max(axis=0, initial=0))
            as_large = _DEALS - np.searchsorted(largest, abs(real) - 1e-9)
            is_clear |= of & ((1 + as_large) / (1 + _DEALS) <= (1 - LEVEL) / _FAMILIES)
        return real, is_clear

    def _correlations(self, signals: np.ndarray) -> np.ndarray:
        """Return the correlations [C, S] of the columns with S signals [R, S]; 0 for a column that is nearly
        zero after the removals."""
        left = np.square(self.x).sum(axis=0)
        scale = np.where(left > _ALIKE * self.whole + 1e-9, 1 / np.sqrt(left + 1e-12), 0)
        return (self.x.T @ signals) * scale[:, None] / np.maximum(np.linalg.norm(signals, axis=0), 1e-12)
