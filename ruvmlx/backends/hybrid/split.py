"""This module runs a model that does not fit one side: the first layers on the C decoder, the other layers
and the output head on MLX. The output of the first layers [T, D] goes from one side to the other."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np

from ...kv.policy import TierPolicy
from ...lora.base_lora import BaseLoRA
from ..base import PAUSED, Adapters, HeadAdapter, KVCache, Step, check_tokens, each, finite
from ..mlx.backend import MLXBackend
from ..native.backend import NativeBackend
from .split_cache import SplitCache


class SplitBackend:
    """A backend (base.Backend) of two backends, each with a part of one model's layers. If one side fails,
    the other cannot go on, because it does not have all layers."""

    name = "hybrid"
    pool = None

    def __init__(self, first: NativeBackend, last: MLXBackend):
        self.first, self.last = first, last
        self.n_first, self.vocab_size = first.config.n_layers, first.config.vocab_size
        self.nbytes, self.scratch = first.nbytes + last.nbytes, first.scratch
        self.chunk = min(first.chunk, last.chunk)
        self.caveat, self.lora = last.caveat, cast(BaseLoRA | None, None)
        end = self.n_first + last.config.n_layers
        self.kernels = (
            f"layers 1-{self.n_first}: {first.kernels}; layers {self.n_first + 1}-{end}: {last.kernels}"
        )

    def set_lora(self, base: BaseLoRA | None) -> None:
        n, places = self.n_first, base.pairs if base else ()
        below = {(m, i): (m, i) for m, i in places if m != "lm_head" and i < n}
        above = {(m, i): (m, 0 if m == "lm_head" else i - n) for m, i in places if (m, i) not in below}
        before = self.first.lora
        self.first.set_lora(base.select_places(below) if base else None)
        try:
            self.last.set_lora(base.select_places(above) if base else None)
        except BaseException:
            self.first.set_lora(before)
            raise
        self.lora = base

    def new_cache(self, policy: TierPolicy | None = None) -> SplitCache:
        return SplitCache(self.first.new_cache(policy), self.last.new_cache(policy))

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        check_tokens(tokens, self.vocab_size)
        found: list[np.ndarray] = []
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            is_last = start + len(part) == len(tokens)
            waiting = (lambda done=start: progress(done)) if progress else None
            found = self._run(part, cache, int(is_last), waiting=waiting)
            if progress:
                progress(start + len(part))
        return _steps(found, adapter)[0]

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        check_tokens([token], self.vocab_size)
        return _steps(self._run([token], cache, 1), adapter)[0]

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        rows = zip(tokens, caches, each(adapter, tokens), strict=True)
        return [self.decode(token, cache, own) for token, cache, own in rows]

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        check_tokens(tokens, self.vocab_size)
        with restore_on_failure(cache):
            found = [self._run(part, cache, len(part)) for part in _parts(tokens, self.chunk)]
        return np.stack([step.logits for some in found for step in _steps(some, adapter)])

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        check_tokens(tokens, self.vocab_size)
        cache, states = cache or self.new_cache(), []
        for part in _parts(tokens, min(self.chunk, PAUSED) if pause else self.chunk):
            states.append(self._run(part, cache, len(part), head=False, waiting=pause)[-1])
            if pause:
                pause()
        return np.concatenate(states)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        return self.last.head(hidden)

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.hidden_states(tokens).mean(axis=0)

    def _run(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        outputs: int,
        *,
        head: bool = True,
        waiting: Callable[[], None] | None = None,
    ) -> list[np.ndarray]:
        """Append tokens to both parts of the cache. Return [logits, hidden states] of the last `outputs`
        tokens; without `head`, [hidden states]. After a failure, the cache has none of the tokens."""
        held = cast(SplitCache, cache)
        with restore_on_failure(held):
            given = self.first.first_layers(tokens, held.first, waiting)
            return self.last.last_layers(given, held.last, outputs, head)


@contextmanager
def restore_on_failure(cache: KVCache) -> Iterator[None]:
    """After a failure in the `with` block, remove the tokens that the block appended to the cache."""
    start = cache.offset
    try:
        yield
    except BaseException:
        cast(SplitCache, cache).cut(start)
        raise


def _steps(found: Sequence[np.ndarray], adapter: HeadAdapter | None) -> list[Step]:
    logits, hidden = (np.array(part) for part in found)
    if adapter is not None:
        adapter.add_to_logits(logits, hidden)
    return list(map(Step, finite(logits), hidden))


def _parts(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (tokens[i : i + size] for i in range(0, len(tokens), size))
