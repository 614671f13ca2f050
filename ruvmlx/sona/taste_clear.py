"""Decides which columns of the taste model the ratings show clearly enough to say them in words.

The model's own interval does not answer this. It is narrow after ten ratings that happen to fit, and it
divides one taste among all columns that go with it. So each column's correlation with the ratings is compared
with the correlations of the same ratings after random shuffling. The largest correlation of all columns
counts, so that many columns do not find more by chance (Westfall & Young 1993). A clear column is then
removed from the ratings and from the other columns, so that one taste is said once.
"""

from dataclasses import dataclass

import numpy as np

from .taste_columns import Column, Scale
from .taste_fit import Rows

# For users whose ratings are random, nothing is said to this share of them. At 0.95, most of what was said
# after ten ratings was wrong: with so few ratings, fewer users show a real taste than chance shows a false
# one.
LEVEL = 0.99
_DEALS = 1000  # the number of shuffles: 10 of them are beyond the level
_FAMILIES = 2  # measures; and all others (words, and kinds of questions). Each gets half of 1 - LEVEL
# The share of a column's square that must remain beside the clear ones; otherwise it says the same.
_ALIKE = 0.1


@dataclass(frozen=True)
class ClearColumn:
    """A clear column. correlation: with the ratings, beside the clearer columns; -1 to 1."""

    column: Column
    correlation: float


def clear_columns(rows: Rows, scale: Scale, most: int) -> list[ClearColumn]:
    """Return up to `most` columns that are clear on their own and beside those found before, the clearest
    first."""
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

    x: [R, C], columns of the rows
    signal: [R], weighted stars
    dealt: [R, _DEALS], the same stars, shuffled
    whole: [C], squares of the columns at the start
    family: [C], 0 or 1
    """

    x: np.ndarray
    signal: np.ndarray
    dealt: np.ndarray
    whole: np.ndarray
    family: np.ndarray

    @classmethod
    def of(cls, rows: Rows, x: np.ndarray, family: np.ndarray) -> "_Evidence":
        """Return the evidence, centred on the means. A pair is a difference and has no mean."""
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
        """Return what is left when a column is removed."""
        unit = self.x[:, column] / np.linalg.norm(self.x[:, column])
        x, signal, dealt = (
            values - np.multiply.outer(unit, unit @ values) for values in (self.x, self.signal, self.dealt)
        )
        return _Evidence(x, signal, dealt, self.whole, self.family)

    def clear(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (correlation, whether it is clear) [C] of each column with the ratings."""
        real = self._correlations(self.signal[:, None])[:, 0]
        chance, is_clear = abs(self._correlations(self.dealt)), np.zeros(len(real), bool)
        for family in range(_FAMILIES):
            of = self.family == family
            largest = np.sort(chance[of].max(axis=0, initial=0))
            as_large = _DEALS - np.searchsorted(largest, abs(real) - 1e-9)
            is_clear |= of & ((1 + as_large) / (1 + _DEALS) <= (1 - LEVEL) / _FAMILIES)
        return real, is_clear

    def _correlations(self, signals: np.ndarray) -> np.ndarray:
        """Return [C, S] with signals [R, S]; 0 for a column of which hardly anything is left."""
        left = np.square(self.x).sum(axis=0)
        scale = np.where(left > _ALIKE * self.whole + 1e-9, 1 / np.sqrt(left + 1e-12), 0)
        return (self.x.T @ signals) * scale[:, None] / np.maximum(np.linalg.norm(signals, axis=0), 1e-12)
