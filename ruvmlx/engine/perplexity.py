"""This module computes the perplexity of a text with the same kind of KV cache as for replies. The module
also compares the predictions with a tiered KV cache (of lower precision) with the predictions with an f16 KV
cache."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend
from ..errors import UsageError
from ..kv.cache import KVStats
from ..kv.policy import F16, TierPolicy
from ..sampling import log_softmax


@dataclass(frozen=True)
class Perplexity:
    """The result of `perplexity`.

    nll: mean negative log-likelihood (nats per token); ppl = e^nll
    tokens: the number of predicted tokens
    kv: the statistics of the cache at the end of the first window, which is the longest
    ppl_f16: the perplexity with an f16 cache, if the cache is tiered
    kl_vs_f16: the mean KL(f16 || tiered) (nats per token), if the cache is tiered
    """

    ppl: float
    nll: float
    tokens: int
    kv: KVStats
    ppl_f16: float | None = None
    kl_vs_f16: float | None = None


def perplexity(
    backend: Backend,
    tokens: list[int],
    context: int,
    policy: TierPolicy | None = None,
    progress: Callable[[int], None] | None = None,
) -> Perplexity:
    """Predict each token with the original model, from the tokens before it, one at a time, in windows of
    `context` tokens.

    Each window starts with an empty cache. The first token of a window is not predicted. A tiered cache is
    compared, token by token, with an f16 cache that receives the same tokens. Raises UsageError if there is
    no token to predict.
    """
    if len(tokens) < 2:
        raise UsageError(
            f"perplexity needs 2 tokens or more; the text has {len(tokens)}. Give a longer text."
        )
    if context < 2:
        raise UsageError(f"perplexity needs a context of 2 tokens or more, not {context}. Give a larger one.")
    compare = policy is not None and policy != F16
    seen = _Seen()
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context]
        caches = [backend.new_cache(p) for p in ((policy, F16) if compare else (policy,))]
        for here, following in itertools.pairwise(window):
            seen.add([log_softmax(backend.decode(here, c).logits) for c in caches], following)
            if progress is not None:
                progress(seen.tokens)
        if start == 0:
            kv = caches[0].stats()
    return seen.result(kv)


class _Seen:
    """The sums, over the predicted tokens so far, of the log-likelihoods and of the KL divergences."""

    def __init__(self) -> None:
        self.tokens, self.nll, self.nll_f16, self.kl = 0, 0.0, 0.0, 0.0
        self.compared = False

    def add(self, logprobs: list[np.ndarray], following: int) -> None:
        """Add one token.

        logprobs: the log-probabilities [V] (one for each token of the vocabulary) with the measured cache; if
            two caches are compared, a second array has the log-probabilities with the f16 cache
        following: the id of the token that was predicted
        """
        self.tokens += 1
        self.nll -= float(logprobs[0][following])
        if len(logprobs) > 1:
            self.compared = True
            self.nll_f16 -= float(logprobs[1][following])
            self.kl += kl_divergence(logprobs[1], logprobs[0])

    def result(self, kv: KVStats) -> Perplexity:
        n = max(1, self.tokens)
        nll = self.nll / n
        if not self.compared:
            return Perplexity(math.exp(nll), nll, self.tokens, kv)
        return Perplexity(math.exp(nll), nll, self.tokens, kv, math.exp(self.nll_f16 / n), self.kl / n)


def kl_divergence(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """Return KL(p || q) in nats, from log-probabilities [V]."""
    log_p = log_p.astype(np.float64)
    return float(np.exp(log_p) @ (log_p - log_q))
