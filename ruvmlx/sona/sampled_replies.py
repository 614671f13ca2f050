"""Replies that no user sees: sampled in one batch, to measure what a model writes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend, HeadAdapter, KVCache
from ..models.config.model import Tokenizer
from ..pausing import Pause

# Token ids without the end token, and whether the reply ended by itself.
SampledReply = tuple[list[int], bool]


@dataclass(frozen=True)
class BegunReply:
    """A prompt that was read. logits: [V], for the reply's first token."""

    cache: KVCache
    logits: np.ndarray

    @classmethod
    def of(cls, backend: Backend, prompt: Sequence[int], adapter: HeadAdapter | None = None) -> "BegunReply":
        cache = backend.new_cache()
        return cls(cache, backend.prefill(list(prompt), cache, adapter).logits)

    def fork(self) -> "BegunReply":
        """Another reply to the same prompt."""
        return BegunReply(self.cache.fork(), self.logits)


def sampled_replies(
    backend: Backend, tokenizer: Tokenizer, begun: Sequence[BegunReply], rng: np.random.Generator,
    longest: int, temperature: float, pause: Pause, adapter: HeadAdapter | None = None,
) -> list[SampledReply]:  # fmt: skip
    """Return one reply to each prompt, of at most `longest` tokens. `pause` is called before each token and
    may raise an exception to stop."""
    logits, ids = [one.logits for one in begun], [list[int]() for _ in begun]
    going, ended = list(range(len(begun))), [False] * len(begun)
    while going:
        pause()
        for i in list(going):
            token = _sample_token(logits[i], temperature, rng)
            ended[i] = token in tokenizer.eos_ids
            if not ended[i]:
                ids[i].append(token)
            if ended[i] or len(ids[i]) >= longest:
                going.remove(i)
        if going:
            last, caches = [ids[i][-1] for i in going], [begun[i].cache for i in going]
            for i, step in zip(going, backend.decode_batch(last, caches, adapter), strict=True):
                logits[i] = step.logits
    return list(zip(ids, ended, strict=True))


def _sample_token(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """A token drawn at a temperature: the largest of logits with Gumbel noise."""
    return int(np.argmax(logits / temperature + rng.gumbel(size=logits.shape)))
