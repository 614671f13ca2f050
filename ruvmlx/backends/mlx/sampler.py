"""This module draws tokens like the engine's sampler (sampling.py), but with MLX operations, so that the host
need not read logits from the device.

The candidate tokens, their order, the uniform random numbers of a seed, and the rule that picks a token
(inverse CDF) are those of sampling.py. A seed draws the same tokens with this sampler and with sampling.py,
except where rounding or the order of equal logits matters; this module adds probabilities in float32.
"""

from collections.abc import Iterator

import numpy as np

from ...platform.mx import mx
from ...sampling import Distribution, Sampling, check_sampling, filters_of, numbers_after

BLOCK = 64  # the number of uniform random numbers that `uniforms` makes at a time
ROW = 256  # `_sums` adds at most this number of probabilities one by one, so that rounding errors stay small
# the largest float32 below 1; with a random number u = 1, no sum of probabilities would exceed u
BELOW_ONE = 1 - 2.0**-24
# below this temperature, the largest logit is subtracted from all logits first, because logits / temperature
# would lose too many digits
COLD = 0.01
MAX_INVERSE_TEMPERATURE = 3e38  # the maximum of 1 / temperature, near the largest float32


class MLXSampler:
    """This class draws the tokens of one reply. A call: logits [1, V] float32 -> token [1] uint32,
    unevaluated."""

    def __init__(self, sampling: Sampling, numbers: Iterator[float] | None = None, draws: int = 0):
        """numbers: one uniform random number from 0 to BELOW_ONE for each token; None: the numbers of
        `sampling.seed`. draws: the number of the reply's tokens that another sampler drew before"""
        check_sampling(sampling)
        self.sampling = sampling
        self._numbers = numbers or uniforms(numbers_after(sampling, draws))

    def __call__(self, logits: mx.array) -> mx.array:
        if self.sampling.temperature == 0:
            return mx.argmax(logits, axis=-1)
        ids, kept = candidates(logits, self.sampling)
        at = draw_index(kept, self.sampling.temperature, next(self._numbers))
        return at if ids is None else mx.take_along_axis(ids, at[:, None], axis=-1)[:, 0]


def candidates(logits: mx.array, sampling: Sampling) -> tuple[mx.array | None, mx.array]:
    """Return (candidate ids, their logits [1, n]) of logits [1, V]. ids: [1, n], the largest logit first, or
    None for all ids in the order of the vocabulary. The logit is -inf if an id must not be drawn. Ids with
    equal logits keep their order if MLX's sort is stable."""
    ids, kept, k = None, logits, sampling.top_k
    by_rank = filters_of(sampling, sorts=True)
    if by_rank or k > 0:
        ids = mx.argsort(-logits, axis=-1)
        kept = mx.take_along_axis(logits, ids, axis=-1)
    seen = Distribution(kept, mx, _softmax, _before)
    for f, value in by_rank + filters_of(sampling, sorts=False):
        kept = mx.where(f.keep(seen, value), kept, -mx.inf)
    return (ids[:, :k], kept[:, :k]) if k and ids is not None else (ids, kept)


def _softmax(logits: mx.array) -> mx.array:
    return mx.softmax(logits, axis=-1)


def _before(p: mx.array) -> mx.array:
    """Return, for each of the probabilities p [1, n], the sum of the earlier probabilities in p, divided by
    the sum of all probabilities."""
    sums = _sums(p)
    return (sums - p) / sums[:, -1:]


def draw_index(logits: mx.array, temperature: float, u: float) -> mx.array:
    """Return [1]: the first index at which the cumulative probability of logits [1, n] exceeds u times the
    total. u: a uniform random number."""
    if temperature < COLD:
        logits = logits - logits.max(axis=-1, keepdims=True)
    p = mx.softmax(logits * min(1 / temperature, MAX_INVERSE_TEMPERATURE), axis=-1)
    mass = _sums(p)
    return mx.argmax(mass > mass[:, -1:] * u, axis=-1)


def _sums(p: mx.array) -> mx.array:
    """Return [1, n]: the sums of the first 1, 2 ... n of the numbers p [1, n].

    The numbers are added within rows of ROW numbers, then each row gets the sum of the earlier rows. If
    49,152 small numbers were added to one float32 one by one, the error would reach 1e-4, and every fifth
    draw from a flat distribution would differ.
    """
    n = p.shape[1]
    if n <= ROW:
        return mx.cumsum(p, axis=-1)
    if n % ROW:
        p = mx.pad(p, [(0, 0), (0, -n % ROW)])
    within = mx.cumsum(p.reshape(-1, ROW), axis=-1)
    before = mx.cumsum(within[:, -1:], axis=0, inclusive=False)
    return (within + before).reshape(1, -1)[:, :n]


def uniforms(rng: np.random.Generator) -> Iterator[float]:
    """Yield the uniform random numbers that the sampler of sampling.py draws from `rng`, one for each token,
    but none above BELOW_ONE."""
    while True:
        yield from np.minimum(rng.random(BLOCK), BELOW_ONE).tolist()
