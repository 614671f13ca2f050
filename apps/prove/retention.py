"""Measures what must not change while a model learns: plain text, variety, length."""

import itertools
from collections.abc import Sequence
from importlib import resources

import numpy as np

from ruvmlx.backends.base import Backend, HeadAdapter
from ruvmlx.sampling import log_softmax

_LIMIT = 1024  # tokens of the neutral text


class NeutralText:
    """Plain text that no rating is about, to measure KL to the frozen model and perplexity on."""

    def __init__(self, backend: Backend, tokenizer):
        text = resources.files(__package__).joinpath("data/neutral.txt").read_text(encoding="utf-8")
        self._backend, self._tokens = backend, tokenizer.encode(text)[:_LIMIT]
        self._frozen = self._logprobs(None)

    def _logprobs(self, adapter: HeadAdapter | None) -> np.ndarray:
        """[T - 1, V] log-probabilities of the token after each token."""
        logits = self._backend.verify(self._tokens[:-1], self._backend.new_cache(), adapter)
        return np.stack([log_softmax(row) for row in logits])

    def compare(self, adapter: HeadAdapter | None) -> tuple[float, float]:
        """(mean KL(new || frozen) in nats per token, relative change of perplexity) of the model with this
        adapter."""
        new = self._logprobs(adapter)
        kl = np.sum(np.exp(new) * (new - self._frozen), axis=1, dtype=np.float64).mean()
        index = np.arange(len(new)), np.asarray(self._tokens[1:])
        change = float((self._frozen[index] - new[index]).mean(dtype=np.float64))
        return float(kl), float(np.expm1(change))


def distinct_2(replies: Sequence[Sequence[int]]) -> float:
    """Share of different pairs among all pairs of neighbouring tokens (Li et al. 2016)."""
    pairs = [pair for ids in replies for pair in itertools.pairwise(ids)]
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def variety_ratio(new: Sequence[Sequence[int]], old: Sequence[Sequence[int]]) -> float:
    """distinct-2 of the new replies over that of the old.

    Longer texts repeat more, so each pair of replies is cut to the shorter of the two.
    """
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(new, old, strict=True)]
    return distinct_2([a for a, _ in pairs]) / distinct_2([b for _, b in pairs])
