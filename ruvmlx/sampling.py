"""Draw the next token from logits.

Filters act on the distribution at temperature 1, in mlx-lm's order (top-p, min-p, top-k); what is left
is drawn at the given temperature. NumPy rather than mlx-lm's sampler: the native backend has no MLX, and
a seed must give the same reply whatever else drew random numbers in this process.
"""

from dataclasses import dataclass

import numpy as np

from .errors import UsageError

# Log-probabilities down to which a nucleus is looked for: a full sort of 49,152 takes 4 ms, and no more than
# e^7 = 1,097 ids can have over e^-7.
_FLOORS = (-7.0, -10.0, -np.inf)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


def check_sampling(sampling: Sampling) -> None:
    """Raise UsageError for a value that means nothing."""
    rules = [
        ("temperature", sampling.temperature, sampling.temperature >= 0, "0 or more"),
        ("top-p", sampling.top_p, 0 < sampling.top_p <= 1, "over 0 and at most 1"),
        ("min-p", sampling.min_p, 0 <= sampling.min_p < 1, "0 or more and under 1"),
        ("top-k", sampling.top_k, sampling.top_k >= 0, "0 or more"),
        ("seed", sampling.seed, sampling.seed is None or sampling.seed >= 0, "0 or more"),
    ]
    for name, value, good, expected in rules:
        if not good:
            raise UsageError(f"{name} is {value}; it must be {expected}.")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[V] -> [V] float32."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)


def top_ids(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest logits, largest first; ties by id."""
    if k >= logits.size:
        return np.argsort(-logits, kind="stable")
    least = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > least)
    ids = np.r_[above, np.flatnonzero(logits == least)[: k - above.size]]
    return ids[np.lexsort((ids, -logits[ids]))]


def _nucleus(logits: np.ndarray, logprobs: np.ndarray, top_p: float) -> np.ndarray:
    """The fewest most likely ids whose mass reaches top_p, most likely first; ties by id."""
    for floor in _FLOORS:
        ids = np.flatnonzero(logprobs >= floor)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        mass = np.cumsum(np.exp(logprobs[ids]), dtype=np.float64)
        if ids.size and mass[-1] >= top_p:
            break
    return ids[: int(np.searchsorted(mass, top_p)) + 1]


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Ids that may be drawn and their log-probabilities at temperature 1."""
    logprobs = log_softmax(logits)
    ids = np.arange(logits.size)
    if sampling.top_p < 1:
        ids = _nucleus(logits, logprobs, sampling.top_p)
    if sampling.min_p > 0:
        ids = ids[logprobs[ids] >= logprobs.max() + np.log(sampling.min_p)]
    if sampling.top_k > 0:  # the most likely first, also where k is more than there are
        ids = ids[top_ids(logits[ids], sampling.top_k)]
    return ids, logprobs[ids]


class Sampler:
    """Draws tokens for one reply; the same seed gives the same draws."""

    def __init__(self, sampling: Sampling):
        check_sampling(sampling)
        self.sampling = sampling
        self._rng = np.random.default_rng(sampling.seed)

    def __call__(self, logits: np.ndarray) -> int:
        """logits [V] -> token id."""
        if self.sampling.temperature == 0:
            return int(np.argmax(logits))
        ids, logprobs = candidates(logits, self.sampling)
        scaled = logprobs.astype(np.float64) / self.sampling.temperature
        mass = np.cumsum(np.exp(scaled - scaled.max()))
        drawn = int(np.searchsorted(mass, self._rng.random() * mass[-1], side="right"))
        return int(ids[min(drawn, ids.size - 1)])
