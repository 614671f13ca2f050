"""This module decides which likings of a user the ratings show clearly enough to tell the user. Each liking
is about one column of the taste model (taste.py): a measure of the text, or a word, perhaps only in questions
with a certain first word.

The uncertainty that the taste model states is no good test of a liking. The stated uncertainty is small after
ten ratings that fit the liking by chance, and the model divides one taste among all columns that vary
together. So the module compares each column's correlation with the ratings with the correlations after the
same ratings are shuffled (a preference then gets a random sign). The threshold comes from the largest
correlation of a family's columns in each shuffle, so that many columns do not give more findings by chance
(Westfall & Young 1993). A clear column is then projected out of the ratings and of the other columns, so that
one taste is found only once.
"""

from dataclasses import dataclass

import numpy as np

from .taste_columns import Column, Scale
from .taste_evidence import sums_of_products
from .taste_fit import Rows

# The share of users with random ratings for whom the module finds nothing. At 0.95, most findings after ten
# ratings were wrong: with ten ratings, a real taste was found for fewer users than a false taste by chance.
LEVEL = 0.99
_DEALS = 1000  # the number of shuffles of the ratings; the share 1 - LEVEL of these shuffles is 10
_FAMILIES = 2  # families of columns: measures, and all other columns; each has half of the share 1 - LEVEL
# A column repeats the clear columns if less than this share of its square remains after the clear columns are
# projected out.
_ALIKE = 0.1


@dataclass(frozen=True)
class ClearColumn:
    """A column whose relation to the ratings is clear. correlation: its correlation with the ratings, -1 to
    1, after the clearer columns are projected out."""

    column: Column
    correlation: float


def clear_columns(rows: Rows, scale: Scale, most: int) -> list[ClearColumn]:
    """Return at most `most` clear columns, the clearest first. A column must be clear before any column is
    projected out, and also after the columns that were found before it are projected out."""
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
    """The columns and the ratings, in R rows (ratings and preferences) with C columns.

    x: [R, C], the value of each column (a measure or a word) in each rated reply; for a preference, the
        better reply's value minus the other's
    signal: [R], the weighted stars of each row
    dealt: [R, _DEALS], the same stars after each of the shuffles
    whole: [C], the sum of squares of each column before any column is projected out
    family: [C], the family of each column: 0 for measures, 1 for all other columns
    """

    x: np.ndarray
    signal: np.ndarray
    dealt: np.ndarray
    whole: np.ndarray
    family: np.ndarray

    @classmethod
    def of(cls, rows: Rows, x: np.ndarray, family: np.ndarray) -> "_Evidence":
        """Return the columns and the ratings of these rows, minus their means. The row of a preference is a
        difference of two replies, so no mean is subtracted from this row."""
        pairs = rows.pairs
        rated, y = np.delete(np.arange(len(rows.y)), pairs), rows.y.copy()
        if rated.size:
            y[rated] -= np.average(y[rated], weights=rows.weight[rated])
            x[rated] -= x[rated].mean(axis=0)
        # The seed is fixed, so that the same ratings always give the same result.
        signal, rng = y * rows.weight, np.random.default_rng(0)
        dealt = np.repeat(signal[:, None], _DEALS, axis=1)
        dealt[rated] = rng.permuted(dealt[rated], axis=0)
        dealt[pairs] *= rng.choice((-1.0, 1.0), (len(pairs), _DEALS))
        return cls(x, signal, dealt, np.square(x).sum(axis=0), family)

    def without_column(self, column: int) -> "_Evidence":
        """Return the evidence after a column is projected out of the ratings and of all columns."""
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
        zero after clear columns were projected out."""
        left = np.square(self.x).sum(axis=0)
        scale = np.where(left > _ALIKE * self.whole + 1e-9, 1 / np.sqrt(left + 1e-12), 0)
        products = sums_of_products(self.x, signals) * scale[:, None]
        return products / np.maximum(np.linalg.norm(signals, axis=0), 1e-12)
