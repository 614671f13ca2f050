"""This module computes how a MicroLoRA changes the mean negative log-likelihood of the prose in the reference
text."""

import numpy as np

from ..pausing import Pause
from .coordinates import pack_columns
from .kl_probe import ROWS, Head, softmax_rows

_TINY = np.finfo(np.float32).tiny  # a smaller probability is rounded to zero, whose logarithm is not finite


class Drift:
    """A computation of the gradient of a text's mean negative log-likelihood by lora_b: [r, A + 1].

    The gradient is the mean of u (p - onehot(y))^T over T hidden states [T, D]. u is a state times `reading`
    (lora_a [D, r]), p is the model's prediction, and y is the token that follows in the text. The last column
    is the sum over all tokens that are not in `tokens`.

    losses: [T], the negative log-likelihood of each token y (nats), known after `run`
    """

    def __init__(self, states: np.ndarray, following: np.ndarray, reading: np.ndarray, tokens: np.ndarray):
        self._states, self._following, self._reading, self._tokens = states, following, reading, tokens
        self._total = np.zeros((reading.shape[1], tokens.size + 1), np.float32)
        self._at = 0
        self.losses = np.zeros(len(states), np.float32)

    def run(self, head: Head, pause: Pause) -> np.ndarray:
        """Return the gradient. `pause` can raise an exception to stop; the next call continues the sum."""
        while self._at < len(self._states):
            part = slice(self._at, self._at + ROWS)
            rows, y = softmax_rows(head(self._states[part])), self._following[part]
            self.losses[part] = losses(rows, y)
            rows[np.arange(len(rows)), y] -= 1
            self._total += (self._states[part] @ self._reading).T @ pack_columns(rows, self._tokens)
            self._at += ROWS
            pause()
        return self._total / max(1, len(self._states))


def losses(probabilities: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the negative log-likelihood (nats) of one token in each row of probabilities.

    probabilities: [T, V]; tokens: [T], the ids; returns [T]
    """
    said = probabilities[np.arange(len(tokens)), tokens]
    return -np.log(np.where(said < _TINY, _TINY, said))
