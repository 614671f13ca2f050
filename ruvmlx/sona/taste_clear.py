"""Which columns of the taste model the ratings show clearly enough to be said in words.

The model's own interval does not answer that. It is narrow after ten ratings that happen to fit, and it
shares one taste among all columns that go with it. So each column's correlation with the ratings is compared
with those that the same ratings give when they are dealt out again at random. The largest correlation of all
columns counts, so that looking at many columns finds no more by chance (Westfall & Young 1993). A column that
is clear is then taken out of the ratings and of the other columns: one taste is said once.
"""

from dataclasses import dataclass

import numpy as np

from .taste_columns import Column, Scale
from .taste_fit import Rows

# The share of users with ratings at random of whom nothing is said. At 0.95, most of what was said after ten
# ratings was wrong: so few ratings show a real taste to fewer users than chance shows a false one.
LEVEL = 0.99
_DEALS = 1000  # times that the ratings are dealt out: 10 of them lie beyond the level
_FAMILIES = 2  # measures; all else (words, and kinds of questions). Each gets half of 1 - LEVEL
_ALIKE = 0.1  # of a column's square that must remain beside the clear ones; else it says the same


@dataclass(frozen=True)
class ClearColumn:
    """correlation: with the ratings, beside the clearer columns; -1 to 1."""

    column: Column
    correlation: float


def clear_columns(rows: Rows, scale: Scale, most: int) -> list[ClearColumn]:
    """Up to `most` columns that are clear on their own and beside those found before, the clearest first."""
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
        seen = seen.without(best)
        correlation, still = seen.clear()
        is_clear = is_clear & still
    return found


@dataclass(frozen=True)
class _Evidence:
    """x [R, C]: columns of the rows. signal [R]: weighted stars. dealt [R, _DEALS]: the same, dealt out at
    random. whole [C]: squares of the columns at first. family [C]: 0 or 1."""

    x: np.ndarray
    signal: np.ndarray
    dealt: np.ndarray
    whole: np.ndarray
    family: np.ndarray

    @classmethod
    def of(cls, rows: Rows, x: np.ndarray, family: np.ndarray) -> "_Evidence":
        """All about their means; a pair is a difference and has none."""
        pairs = rows.pairs
        rated, y = np.delete(np.arange(len(rows.y)), pairs), rows.y.copy()
        if rated.size:
            y[rated] -= np.average(y[rated], weights=rows.weight[rated])
            x[rated] -= x[rated].mean(axis=0)
        signal, rng = y * rows.weight, np.random.default_rng(0)  # the same ratings always say the same
        dealt = np.repeat(signal[:, None], _DEALS, axis=1)
        dealt[rated] = rng.permuted(dealt[rated], axis=0)
        dealt[pairs] *= rng.choice((-1.0, 1.0), (len(pairs), _DEALS))
        return cls(x, signal, dealt, np.square(x).sum(axis=0), family)

    def without(self, column: int) -> "_Evidence":
        """What is left beside a column."""
        unit = self.x[:, column] / np.linalg.norm(self.x[:, column])
        x, signal, dealt = (
            values - np.multiply.outer(unit, unit @ values) for values in (self.x, self.signal, self.dealt)
        )
        return _Evidence(x, signal, dealt, self.whole, self.family)

    def clear(self) -> tuple[np.ndarray, np.ndarray]:
        """(correlation, whether it is clear) [C] of each column with the ratings."""
        real = self._correlations(self.signal[:, None])[:, 0]
        chance, is_clear = abs(self._correlations(self.dealt)), np.zeros(len(real), bool)
        for family in range(_FAMILIES):
            of = self.family == family
            largest = np.sort(chance[of].max(axis=0, initial=0))
            as_large = _DEALS - np.searchsorted(largest, abs(real) - 1e-9)
            is_clear |= of & ((1 + as_large) / (1 + _DEALS) <= (1 - LEVEL) / _FAMILIES)
        return real, is_clear

    def _correlations(self, signals: np.ndarray) -> np.ndarray:
        """[C, S] with signals [R, S]; 0 for a column of which hardly anything is left."""
        left = np.square(self.x).sum(axis=0)
        scale = np.where(left > _ALIKE * self.whole + 1e-9, 1 / np.sqrt(left + 1e-12), 0)
        return (self.x.T @ signals) * scale[:, None] / np.maximum(np.linalg.norm(signals, axis=0), 1e-12)
