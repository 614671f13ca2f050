"""Baselines for the study of the taste model: ridge regression and Gaussian processes.

Each predicts (mean, standard deviation) of the stars of all R replies from the stars of some. The scales of
tokens, words and hidden states are taken from all replies to the rated questions, which favours these models
a little.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ruvmlx.sona.taste_features import features_of, grams

from .taste_replies import SampledReplies

Rival = Callable[["Kernels", np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
NEUTRAL = 3.0


class Kernels:
    """Similarity [R, R] of all replies by one kind of feature; the mean of its diagonal is 1."""

    def __init__(self, replies: SampledReplies):
        self.replies = replies
        self._trained = replies.trained[replies.question]

    @cached_property
    def tokens(self) -> np.ndarray:
        """[R, 219] roots of the rates of the commonest tokens."""
        return self._rates([ids.tolist() for ids in self.replies.tokens], 219)

    @cached_property
    def by_token(self) -> np.ndarray:
        """Rates as they are: a common token, whose rate varies more, counts more."""
        return self.linear(self.tokens)

    @cached_property
    def by_word(self) -> np.ndarray:
        return self.linear(self._rates([grams(text) for text in self.replies.texts], 300))

    @cached_property
    def measures(self) -> np.ndarray:
        pairs = zip(self.replies.question, self.replies.texts, self.replies.finished, strict=True)
        found = [features_of(self.replies.questions[q], text, bool(end)).measures for q, text, end in pairs]
        return np.clip(np.stack(found).astype(float), -4, 4)

    @cached_property
    def by_measure(self) -> np.ndarray:
        return self.linear(self.measures)

    @cached_property
    def near_measure(self) -> np.ndarray:
        """A Gaussian of the distance: any smooth function of the measures."""
        square = (self.measures**2).sum(axis=1)
        distance = square[:, None] + square - 2 * self.measures @ self.measures.T
        return np.exp(-np.maximum(distance, 0) / (4 * self.measures.shape[1]))

    @cached_property
    def by_state(self) -> np.ndarray:
        """The 32 directions in which mean hidden states of replies to one question differ most, as one
        scale."""
        states = self.replies.hidden.astype(float)
        _, size, rows = np.linalg.svd(self._centre_by_question(states), full_matrices=False)
        return self.linear(states @ (rows[:32] / size[:32, None]).T)

    @cached_property
    def by_question(self) -> np.ndarray:
        asked = self.replies.asked.astype(float)[self.replies.question]
        return asked @ asked.T

    def linear(self, x: np.ndarray) -> np.ndarray:
        x = x - x[self._trained].mean(axis=0)
        found = x @ x.T
        return found / found.diagonal()[self._trained].mean()

    def _centre_by_question(self, x: np.ndarray) -> np.ndarray:
        """Rows of the rated questions, centred in each question."""
        rows = [np.flatnonzero(self.replies.question == q) for q in np.flatnonzero(self.replies.trained)]
        return np.concatenate([x[r] - x[r].mean(axis=0) for r in rows])

    def _rates(self, parts: Sequence[Sequence], most: int) -> np.ndarray:
        """[R, most]"""
        seen = Counter(part for row, of in enumerate(parts) if self._trained[row] for part in set(of))
        place = {part: at for at, (part, _) in enumerate(seen.most_common(most))}
        found = np.zeros((len(parts), most))
        for row, of in enumerate(parts):
            for part in of:
                if part in place:
                    found[row, place[part]] += 1
            found[row] = np.sqrt(found[row] / (len(of) + 10))
        return found

    @cached_property
    def ridge_features(self) -> np.ndarray:
        """[R, F]: token rates, log length, ended, mean hidden state; each with variance 1 within a
        question."""
        replies = self.replies
        length = np.log([len(ids) for ids in replies.tokens])
        x = np.column_stack([self.tokens**2, length, replies.finished, replies.hidden]).astype(float)
        spread = self._centre_by_question(x).std(axis=0)
        return (x - x[self._trained].mean(axis=0)) / np.maximum(spread, 1e-3)


def ridge(of: Kernels, rated: np.ndarray, stars: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ridge regression; its strength by leave-one-out, and the error of that as its uncertainty."""
    x = of.ridge_features
    kernel = x @ x[rated].T / x.shape[1]
    best: tuple[float, np.ndarray] | None = None
    for strength in 2.0 ** np.arange(-8, 9):
        inverse = np.linalg.inv(kernel[rated] + strength * np.eye(len(rated)))
        weights = inverse @ (stars - stars.mean())
        error = float(np.mean((weights / inverse.diagonal()) ** 2))
        if best is None or error < best[0]:
            best = error, weights
    assert best is not None
    return stars.mean() + kernel @ best[1], np.full(len(x), np.sqrt(best[0]))


def process(*parts: str) -> Rival:
    """A Gaussian process with a sum of kernels, named as in Kernels; "a * b" is their product. Amplitudes and
    noise by marginal likelihood, with a log-normal prior."""

    def fit_rival(of: Kernels, rated: np.ndarray, stars: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kernels = [np.prod([getattr(of, name) for name in part.split(" * ")], axis=0) for part in parts]
        logs = _amplitudes([k[np.ix_(rated, rated)] for k in kernels], stars - NEUTRAL)
        whole = 1.5 + sum(2**log * k for log, k in zip(logs, kernels, strict=False))
        cross = whole[:, rated]
        seen = cross[rated] + 2 ** logs[-1] * np.eye(len(rated))
        mean = NEUTRAL + cross @ np.linalg.solve(seen, stars - NEUTRAL)
        known = np.einsum("rn,nr->r", cross, np.linalg.solve(seen, cross.T))
        return mean, np.sqrt(np.maximum(whole.diagonal() - known, 0) + 2 ** logs[-1])

    return fit_rival


def _amplitudes(kernels: list[np.ndarray], y: np.ndarray) -> np.ndarray:
    """log2 of each kernel's variance and, last, of the noise: coordinate ascent."""
    usual = np.r_[np.full(len(kernels), -2.0), -1.0]
    spread = np.r_[np.full(len(kernels), 2.0), 1.5]

    def score(logs: np.ndarray) -> float:
        whole = 1.5 + sum(2**log * k for log, k in zip(logs, kernels, strict=False))
        lower = np.linalg.cholesky(whole + 2 ** logs[-1] * np.eye(len(y)))
        z = np.linalg.solve(lower, y)
        return -0.5 * z @ z - np.log(lower.diagonal()).sum() - 0.5 * np.sum(((logs - usual) / spread) ** 2)

    logs, best = usual.copy(), score(usual)
    for step in (2.0, 1.0, 0.5):
        for at in range(len(logs)):
            for move in (step, -step):
                while abs(logs[at] + move) <= 9:
                    moved = logs.copy()
                    moved[at] += move
                    value = score(moved)
                    if value <= best + 1e-3:
                        break
                    logs, best = moved, value
    return logs


RIVALS: dict[str, Rival] = {
    "ridge on tokens and states": ridge,
    "token rates": process("by_token"),
    "word rates": process("by_word"),
    "hidden states": process("by_state"),
    "measures": process("by_measure"),
    "measures, words": process("by_measure", "by_word"),
    "measures, words, states": process("by_measure", "by_word", "by_state"),
    "measures x question": process("by_measure", "by_word", "by_measure * by_question"),
    "measures, smooth": process("by_measure", "by_word", "near_measure"),
    "all kernels": process(
        "by_measure", "near_measure", "by_word", "by_state", "by_question", "by_measure * by_question"
    ),
}
