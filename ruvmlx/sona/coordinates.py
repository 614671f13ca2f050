"""This module defines the coordinates in which ratings are added up: one coordinate for each movable token,
and one for each token feature. A movable token is a token whose logit ratings may change. A feature is a
direction in which the logits of similar tokens change together."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..kernels import matmul
from ..kernels.rating import EvidenceSolver
from ..lora import MicroLoRA


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of one model, with A movable tokens and k features.

    tokens: [A], the ids of the movable tokens, ascending
    eos: [E], the ids of the E tokens that end a reply
    precision: [A + k], 1 / sigma^2 of the prior of each token's and each feature's weight
    features: [A, k], the directions in which the logits of tokens change together
    rank: the rank r of the MicroLoRA
    """

    tokens: np.ndarray
    eos: np.ndarray
    precision: np.ndarray
    features: np.ndarray
    rank: int

    @property
    def k(self) -> int:
        return self.features.shape[1]

    @cached_property
    def ends(self) -> np.ndarray:
        """The indices in `tokens` of the tokens that end a reply."""
        return np.flatnonzero(np.isin(self.tokens, self.eos)).astype(np.int32)

    @cached_property
    def solver(self) -> EvidenceSolver:
        """The solver that computes lora_b's columns [r, A + 1] from the evidence [3, r, A + k] of all
        ratings. As in the result of `columns`, the columns are those of the movable tokens, then one of
        zeros."""
        features = matmul.Matrix(self.features.astype(np.float16))
        return EvidenceSolver(self.precision, features, self.rank, self.ends)

    def columns(self, lora_b: np.ndarray) -> np.ndarray:
        """Return lora_b's columns of the movable tokens and a column of zeros: [r, V] -> [r, A + 1] (V:
        vocabulary size)."""
        block = np.zeros((len(lora_b), self.tokens.size + 1), np.float32)
        block[:, :-1] = lora_b.take(self.tokens, axis=1)
        return block

    def covers(self, adapter: MicroLoRA) -> bool:
        """Return True if lora_b is zero for all tokens except the movable tokens."""
        b = adapter.lora_b
        return np.count_nonzero(b) == np.count_nonzero(b.take(self.tokens, axis=1))

    def indices(self, following: np.ndarray) -> np.ndarray:
        """Return the index in `tokens` of each of M token ids: [M] -> [M] int32. An id that is not in
        `tokens` gets the index A."""
        at = np.minimum(np.searchsorted(self.tokens, following), self.tokens.size - 1)
        return np.where(self.tokens[at] == following, at, self.tokens.size).astype(np.int32)


def pack_columns(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the columns of the A `tokens`, and as the last column the sum of all other columns: [T, V] ->
    [T, A + 1] float32."""
    others = np.ones(values.shape[1], bool)
    others[tokens] = False
    return np.column_stack(
        [values.take(tokens, axis=1), values[:, others].sum(axis=1, dtype=np.float64)]
    ).astype(np.float32)
