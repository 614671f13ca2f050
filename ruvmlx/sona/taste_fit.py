"""This module fits the taste model (taste.py) to ratings. The module selects columns by the evidence p(y)
(the probability of the ratings under the model), chooses the variances, and finds a turn of the taste (a
rating at which the user's taste changed)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .taste_columns import Candidates, Column, Scale, candidates, design
from .taste_evidence import (
    LEAST_NOISE,
    USUAL_NOISE,
    Posterior,
    Sums,
    Variances,
    coordinate_ascent,
    hyperprior,
    log_evidence,
    log_evidences,
    sums_of_products,
)
from .taste_features import ReplyFeatures, ReplyTable
from .taste_measures import MEASURES

M = len(MEASURES)
# The prior variance of a measure's weight. The effects of all M measures together have a standard deviation
# of half a star before any rating.
BASE = 0.25 / M
MAX_COLUMNS = 8  # the maximum number of selected columns
_MAX_PRIOR_VARIANCE, _MIN_PRIOR_VARIANCE = 1.0, 0.02  # limits of a selected column's prior variance

CHANCE = 0.1  # the prior probability that a measure matters to a user
LENGTH_CHANCE = 0.6  # the prior probability that the first two measures (length, completeness) matter

DEGREES = 4.0  # the degrees of freedom of the noise's Student's t distribution

# The search for a turn tries these numbers of ratings after the turn.
TURN_AGES = 6, 8, 10, 13, 16, 20, 25, 32, 40, 50, 63, 80, 100, 160, 250, 400
LEAST_OLD = 6  # the minimum number of ratings before a turn
REMEMBERED = 200  # the maximum number of ratings before a turn from which columns are selected
TURN_COST = 8.0  # the minimum log-evidence that a turn must add
# If a user's taste turns, the next replies do not please the user. So the search takes no turn after which
# the next SOON ratings are high: their mean (stars minus 3) is at least PLEASED times the highest rating.
SOON, PLEASED = 10, 0.75


@dataclass(frozen=True)
class Rows:
    """The R rows of the taste model's regression. A row is a rating, or a pair (a preference between two
    replies).

    replies: for each row, the features of the rated reply, or of the better reply of a pair
    y: [R], the stars of a rating minus 3 (neutral); for a pair, the better reply's stars minus the worse's
    weight: [R], the weight of each row; 1 is the weight of one rating
    worse: for each row, the features of the worse reply of a pair; None for a rating
    coarse: the minimum noise variance, because a rating is a rounded number of stars
    """

    replies: ReplyTable
    y: np.ndarray
    weight: np.ndarray
    worse: Sequence[ReplyFeatures | None]
    coarse: float = LEAST_NOISE

    def __getitem__(self, part: slice) -> "Rows":
        cut = {name: getattr(self, name)[part] for name in ("y", "weight", "worse")}
        return replace(self, replies=self.replies.part(part), **cut)

    def __add__(self, other: "Rows") -> "Rows":
        return replace(
            self,
            replies=self.replies + other.replies,
            y=np.r_[self.y, other.y],
            weight=np.r_[self.weight, other.weight],
            worse=[*self.worse, *other.worse],
        )

    @property
    def pairs(self) -> list[int]:
        """The indices of the rows that are pairs."""
        return [row for row, worse in enumerate(self.worse) if worse is not None]

    @property
    def all_replies(self) -> ReplyTable:
        """The features of the replies of all rows, then of the worse replies of the pairs."""
        return self.replies + ReplyTable.of([worse for worse in self.worse if worse is not None])

    @property
    def rated_stars(self) -> np.ndarray:
        """The values y of the rows that are not pairs."""
        return np.delete(self.y, self.pairs)

    def share_of_questions(self, opener: int | None) -> float:
        """Return the share of the rows whose question begins with the word that has the hash `opener`; 1 for
        None."""
        return 1.0 if opener is None else float(np.mean(self.replies.openers == opener))

    def differences(self, values: np.ndarray) -> np.ndarray:
        """Return the values [R, C] of the R rows of the regression. A row of a rated reply has the reply's
        values. A row of a pair has the better reply's values minus the worse reply's values.

        values: [E, C], C values of each of the E replies in `all_replies`
        """
        found = values[: len(self.replies)].copy()
        found[self.pairs] -= values[len(self.replies) :]
        return found

    def design(self, columns: Sequence[Column], scale: Scale) -> np.ndarray:
        """Return the design matrix of the rows: [R, 1 + M + K] (intercept, M measures, K columns). The row of
        a pair is a difference of two replies, so its intercept is 0."""
        return self.differences(design(self.all_replies, columns, scale))

    def candidates(self, scale: Scale) -> Candidates:
        """Return the candidate columns with their values for the rows."""
        pool = candidates(self.all_replies, scale)
        return replace(pool, values=self.differences(pool.values)) if self.pairs else pool

    def sums(self, x: np.ndarray) -> Sums:
        return Sums.of(x, self.y, self.weight)


@dataclass(frozen=True)
class TasteFit:
    """The result of a fit of the taste model.

    columns: the selected columns
    shares: for each selected column, the share of the rows to which the column applies
        (`Rows.share_of_questions`)
    turned: the number of ratings before the newest turn of the taste, to which the weights are not fitted; 0
        if there was no turn
    """

    columns: tuple[Column, ...]
    shares: tuple[float, ...]
    variances: Variances
    posterior: Posterior
    scale: Scale
    turned: int = 0


def fit(ratings: Rows, background: ReplyTable) -> TasteFit:
    """Fit the taste model, and return the result.

    ratings: ratings and pairs, the oldest first
    background: replies that the user saw and did not rate
    """
    rows = with_background(ratings, background)
    scale = Scale.of(rows.all_replies)
    begun = select_columns(rows, rows.candidates(scale))
    at = turn(ratings, begun.x[: len(ratings.y)], begun.variances)
    if not at:
        return _robust(begun).fit
    before = ratings[max(0, at - REMEMBERED) : at]
    known = (*select_columns(before, before.candidates(scale)).columns, *begun.columns)
    rows = with_background(ratings[at:], background)
    after = select_columns(rows, rows.candidates(scale), tuple(dict.fromkeys(known))[:MAX_COLUMNS])
    return replace(_robust(after).fit, turned=at)


def log_evidence_of_measures(rows: Rows) -> float:
    """Return log p(y) of a taste model without selected columns. This value compares models that use
    different features of the same ratings."""
    sums = rows.sums(rows.design((), Scale.of(rows.all_replies)))
    variances = _fit_variances(Variances(BASE, USUAL_NOISE, (), rows.coarse), sums, ())
    return log_evidence(sums, variances.prior(M), variances.noise)


def with_background(ratings: Rows, background: ReplyTable) -> Rows:
    """Return the ratings, and the background (unrated replies) as more ratings. If nearly all ratings are up,
    an unrated reply counts as a rating below neutral. If nearly all ratings are down, an unrated reply counts
    as a rating above neutral. All background replies together have the weight `missing_side`.
    """
    rated = ratings.rated_stars
    total = missing_side(rated)
    used = background if total else background.part(slice(0))
    passed_over = -float(np.sign(rated).sum()) / max(1, int(np.count_nonzero(rated)))
    weight = np.full(len(used), total / max(1, len(used)))
    return ratings + Rows(used, np.full(len(used), passed_over), weight, [None] * len(used))


def missing_side(y: np.ndarray) -> int:
    """Return how many ratings are missing on the rarer side: above or below neutral. The result is len(y) if
    the rarer side has no ratings, and 0 if the rarer side has a quarter or more of the ratings. y: the stars
    of ratings minus 3."""
    return max(0, len(y) - 4 * min(int((y > 0).sum()), int((y < 0).sum())))


# -- columns ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The selected columns with the fitted variances. x: [R, d], the design matrix: the intercept, the
    measures and the selected columns for the R rows."""

    rows: Rows
    pool: Candidates
    columns: tuple[Column, ...]
    x: np.ndarray
    variances: Variances

    @property
    def posterior(self) -> Posterior:
        return self._posterior(self.variances.noise)

    def _posterior(self, noise: float) -> Posterior:
        prior, chance = self.variances.prior(M), np.full(self.x.shape[1], np.nan)
        chance[1 : 1 + M], chance[1:3] = CHANCE, LENGTH_CHANCE
        return Posterior.sparse(self.rows.sums(self.x), prior, chance, noise)

    @property
    def fit(self) -> TasteFit:
        # A selected column is the best of hundreds of candidates, so it fits some noise: about as much as two
        # columns that were chosen before the ratings.
        count = len(self.rows.y)
        free = max(count / 3, count - 1 - 2 * len(self.columns))
        noise = self.variances.noise * max(1.0, count / max(free, 1.0))
        shares = tuple(self.rows.share_of_questions(column.opener) for column in self.columns)
        return TasteFit(self.columns, shares, self.variances, self._posterior(noise), self.pool.scale)


def select_columns(
    rows: Rows,
    pool: Candidates,
    known: tuple[Column, ...] = (),
    x: np.ndarray | None = None,
    most: int = MAX_COLUMNS,
) -> Selection:
    """Select the candidate columns that raise the evidence most, one after the other. Return the selection.

    pool: the candidate columns
    known: the columns that are selected at the start
    x: [R, d], the design matrix with the known columns; None to compute it
    most: the maximum number of selected columns
    """
    columns, usual = list(known), [_MAX_PRIOR_VARIANCE / 4] * len(known)
    x = rows.design(columns, pool.scale) if x is None else x
    start = Variances(BASE, USUAL_NOISE, tuple(usual), rows.coarse)
    variances = _fit_variances(start, rows.sums(x), usual)
    if len(columns) >= most:
        return Selection(rows, pool, tuple(columns), x, variances)
    scan = Scan(pool, rows, x, [pool.places[column] for column in columns if column in pool.places])
    while len(columns) < most:
        now = Posterior.of(rows.sums(x), variances.prior(M), variances.noise)
        best, strength = scan.best(now)
        if best is None:
            break
        columns.append(pool.columns[best])
        usual.append(strength)
        x = np.column_stack([x, pool.values[:, best]])
        scan.add(best)
        variances = _fit_variances(replace(variances, own=(*variances.own, strength)), rows.sums(x), usual)
    return Selection(rows, pool, tuple(columns), x, variances)


def _robust(begun: Selection) -> Selection:
    """Return the selection after two more fits, in which a rating that is far from its prediction (such as a
    wrong key press) has less weight. The weight is that of Student's t: (DEGREES + 1) / (DEGREES + error^2 /
    s), where error is the rating minus its prediction and s is the noise variance."""
    weight, found = begun.rows.weight, begun
    for most in (0, MAX_COLUMNS):  # first fit with the same columns, then select more columns
        error = found.rows.y - found.x @ found.posterior.mean
        trust = (DEGREES + 1) / (DEGREES + error * error / found.variances.noise)
        rows = replace(found.rows, weight=weight * trust * len(trust) / max(1.0, trust.sum()))
        found = select_columns(rows, found.pool, found.columns, found.x, most)
    return found


def _fit_variances(start: Variances, sums: Sums, usual: Sequence[float]) -> Variances:
    def score(v: Variances) -> float:
        return log_evidence(sums, v.prior(M), v.noise) + hyperprior(v, BASE, usual)

    # Of the selected columns' variances, fit only the newest column's, because a new column hardly changes
    # the variances of the older columns.
    which, steps = ([0, 1, 1 + len(usual)], (1.0, 0.5)) if usual else ([0, 1], (2.0, 1.0, 0.5))
    return coordinate_ascent(start, which, score, steps)


class Scan:
    """A computation of the scores of all candidate columns at each step of the selection.

    For a candidate column z, let A be the covariance of y with the columns selected so far, q = z^T A^-1 y
    and r = z^T A^-1 z. With prior variance a, the candidate adds [a q^2 / (1 + a r) - log(1 + a r)] / 2 to
    the log-evidence. The prior variance a that adds most is (q^2 - r) / r^2.
    """

    def __init__(self, pool: Candidates, rows: Rows, x: np.ndarray, taken: Sequence[int]):
        """x: [R, d], the design matrix with the columns that are selected so far. taken: the indices of the
        candidates that are already selected."""
        self._pool, self._cost = pool, pool.cost.copy()
        self._cost[list(taken)] = np.inf
        self._weight = rows.weight.astype(np.float32)
        self._zy = pool.values.T @ (self._weight * rows.y.astype(np.float32))
        self._zz = pool.squares.T @ self._weight
        weighted = self._weight[:, None] * x.astype(np.float32)
        self._zx = sums_of_products(pool.values, weighted)  # [C, d]

    def add(self, which: int) -> None:
        """Note that the candidate with the index `which` was selected."""
        column = self._pool.values.T @ (self._weight * self._pool.values[:, which])
        self._zx = np.column_stack([self._zx, column])
        self._cost[which] = np.inf

    def best(self, now: Posterior) -> tuple[int | None, float]:
        """Return (the index of the best candidate, its best prior variance). The best candidate raises the
        log-evidence most above its cost. The index is None if no candidate exceeds its cost."""
        s, zx = now.noise, self._zx
        q = (self._zy - zx @ now.mean) / s
        r = np.maximum((self._zz - np.einsum("cd,cd->c", zx @ now.covariance, zx) / s) / s, 1e-9)
        a = np.clip((q * q - r) / (r * r), 0, _MAX_PRIOR_VARIANCE)
        gain = 0.5 * (a * q * q / (1 + a * r) - np.log1p(a * r)) - self._cost
        best = int(np.argmax(gain))
        return (best, float(max(a[best], _MIN_PRIOR_VARIANCE))) if gain[best] > 0 else (None, 0.0)


# -- a turn of the taste ---------------------------------------------------------------------------------


def turn(ratings: Rows, x: np.ndarray, variances: Variances) -> int:
    """Return the number of ratings before the turn of the taste; 0 if the taste did not turn. For a turn, two
    tastes with separate weights must be clearly more likely than one taste. x: [R, d], the design matrix."""
    count = len(ratings.y)
    cuts = sorted(count - recent for recent in TURN_AGES if count - recent >= LEAST_OLD)
    cuts = [cut for cut in cuts if not _is_pleased(ratings, cut)]
    if not cuts:
        return 0
    ends = [0, *cuts, count]
    parts = [ratings[a:b].sums(x[a:b]) for a, b in itertools.pairwise(ends)]
    joint = np.cumsum([part.joint for part in parts], axis=0)
    counts = np.cumsum([part.count for part in parts])
    sides = ((joint[:-1], counts[:-1]), (joint[-1] - joint[:-1], counts[-1] - counts[:-1]))
    one = log_evidences(joint[-1], counts[-1], variances.prior(M), variances.noise)
    two = np.max(
        [
            np.sum([log_evidences(a, n, sharper.prior(M), sharper.noise) for a, n in sides], axis=0)
            for sharper in _sharper(variances)
        ],
        axis=0,
    )
    best = int(np.argmax(two))
    return cuts[best] if two[best] > one + TURN_COST else 0


def _is_pleased(ratings: Rows, cut: int) -> bool:
    """Return True if the mean of the SOON ratings after a possible turn is at least PLEASED times the user's
    highest rating. cut: the number of ratings before the possible turn"""
    stars = ratings[cut : cut + SOON].rated_stars
    return len(stars) > 0 and float(stars.mean()) >= PLEASED * max(1.0, float(ratings.rated_stars.max()))


def _sharper(variances: Variances) -> list[Variances]:
    """Return variances to try for two tastes: the given noise or less noise, each with the given prior
    variances of the weights or four times these variances. A mixture of two tastes looks like noise, so each
    taste alone has less noise and larger weights than the mixture."""
    less = {max(variances.least, variances.noise / part) for part in (1, 4)}
    return [
        replace(variances, base=variances.base * up, noise=noise, own=tuple(a * up for a in variances.own))
        for noise in sorted(less)
        for up in (1, 4)
    ]
