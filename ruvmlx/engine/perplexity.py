"""How well a model predicts a text, with the cache that it really uses."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend, HeadAdapter
from .sampler import log_softmax


@dataclass(frozen=True)
class Perplexity:
    """nll: mean negative log-likelihood, nats per token; ppl = e^nll. tokens: how many were predicted."""

    ppl: float
    nll: float
    tokens: int
    cache_bytes: int


def perplexity(
    backend: Backend,
    tokens: list[int],
    context: int,
    adapter: HeadAdapter | None = None,
    progress: Callable[[int], None] | None = None,
) -> Perplexity:
    """Predict every token from those before it, one at a time, in windows of `context` tokens.

    Each window starts from an empty cache; its first token is given, not predicted.
    """
    nll, predicted, cache_bytes = 0.0, 0, 0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context]
        cache = backend.new_cache()
        for here, following in itertools.pairwise(window):
            logprobs = log_softmax(backend.decode(here, cache, adapter).logits)
            nll -= float(logprobs[following])
            predicted += 1
            if progress is not None:
                progress(predicted)
        cache_bytes = max(cache_bytes, cache.nbytes)
    mean = nll / max(1, predicted)
    return Perplexity(math.exp(mean), mean, predicted, cache_bytes)


def mean_kl(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """Mean over rows of KL(p || q), nats.  p_logits, q_logits: [T, V]."""
    total = 0.0
    for p, q in zip(p_logits, q_logits, strict=True):
        log_p, log_q = log_softmax(p).astype(np.float64), log_softmax(q)
        total += float(np.exp(log_p) @ (log_p - log_q))
    return total / len(p_logits)
