"""This module computes the log-probability of a reply under a new MicroLoRA from a few stored logits.

A rating can change only the logits of some tokens of the vocabulary, the movable tokens (coordinates.py). So
three things are enough for each token of the reply: the logits of the movable tokens, the logsumexp of all
other logits, and the logit of the token itself. They are logits without the MicroLoRA. The program computes
these numbers in idle time with one pass of the output head. The rating then needs no pass of the output head.
If there was no idle time, the rating runs the output head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..lora import MicroLoRA
from ..pausing import Pause
from .coordinates import Coordinates

MAX_TOKENS = 1024  # a longer reply has no stored logits, which take about 9 kB for each token
_BLOCK = 16  # the number of tokens whose logits the output head computes at a time


@dataclass(frozen=True)
class ReplyLogits:
    """The logits of one reply that the program stores. The reply has T tokens. The logits are those of the
    model without a MicroLoRA.

    base: the id of the base LoRA under which the model computed the logits
    coordinates: the coordinates with the movable tokens
    logits: [T, A + 1] float32, the logits of the A movable tokens; the last column is the logsumexp of the
        logits of all other tokens
    own: [T] float32, the logits of the reply's tokens
    places: [T], the columns of the reply's tokens in `logits`
    """

    base: int
    coordinates: Coordinates
    logits: np.ndarray
    own: np.ndarray
    places: np.ndarray

    @classmethod
    def of(
        cls, hidden: np.ndarray, reply: np.ndarray, coordinates: Coordinates,
        head: Callable[[np.ndarray], np.ndarray], base: int, pause: Pause,
    ) -> "ReplyLogits":  # fmt: skip
        """Compute the logits with the output head.

        hidden: [T, D], the hidden states of the reply's tokens
        reply: [T], the reply's tokens
        head: the function from hidden states to logits without a MicroLoRA
        pause: a function that is called before each block of tokens; it can raise an exception to stop
        """
        kept, own = [], []
        for at in range(0, len(reply), _BLOCK):
            pause()
            frozen = head(np.ascontiguousarray(hidden[at : at + _BLOCK]))
            own.append(frozen[np.arange(len(frozen)), reply[at : at + _BLOCK]])
            block, others = coordinates.columns(frozen), frozen.copy()
            others[:, coordinates.tokens] = -np.inf
            block[:, -1] = _logsumexp(others)
            kept.append(block)
        places = coordinates.indices(reply)
        return cls(base, coordinates, np.concatenate(kept), np.concatenate(own), places)

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + self.own.nbytes + self.places.nbytes

    def mean_logprob(self, adapter: MicroLoRA, hidden: np.ndarray) -> float:
        """Return the mean log-probability (nats per token) that the model with a MicroLoRA gives the reply.

        adapter: the MicroLoRA; it must not change the logits of tokens that are not movable
        hidden: [T, D], the hidden states of the reply's tokens
        """
        block = self.coordinates.columns(adapter.lora_b)
        added = np.float32(adapter.scale) * (hidden @ adapter.lora_a) @ block
        own = self.own + added[np.arange(len(added)), self.places]
        return float(np.mean(own - _logsumexp(self.logits + added), dtype=np.float64))


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    """Return the logarithm of the sum of exp(logits) for each row: [T, V] -> [T]. The result of a row that
    has no finite number is -inf."""
    high = np.maximum(logits.max(axis=1, keepdims=True), np.finfo(np.float32).min)
    with np.errstate(divide="ignore"):
        return high[:, 0] + np.log(np.exp(logits - high).sum(axis=1))
