"""The Backend protocol. T tokens, V vocabulary, D hidden size.

A backend knows nothing of ratings, sessions or text. It is handed token ids, a cache that it made
itself and, perhaps, an adapter; it hands back NumPy arrays that the caller may keep and change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..kv.cache import Dump, KVStats
from ..kv.policy import TierPolicy
from ..lora.base import BaseLoRA

PAUSED = 32  # tokens that are read without a pause: 35 ms of the starter model under a base, on one thread


class Step(NamedTuple):
    """What the model says after the last token."""

    logits: np.ndarray  # [V] float32, the adapter applied
    hidden: np.ndarray  # [D] float32, input of the output head (after the final norm)


class HeadAdapter(Protocol):
    """A low-rank change of the output head, as a backend sees it."""

    def add_to_logits(self, logits: np.ndarray, hidden: np.ndarray) -> None:
        """logits [..., V] += scale * (hidden [..., D] @ lora_a [D, r]) @ lora_b [r, V], in place."""


class KVCache(Protocol):
    """Keys and values of one sequence."""

    @property
    def offset(self) -> int:
        """Tokens held, those that a sliding window has dropped included."""

    @property
    def nbytes(self) -> int:
        """Bytes that the cache occupies now."""

    def trim(self, n: int) -> bool:
        """Forget the newest n tokens, and more where they were kept in 8 or 4 bits: `offset` says what is
        left. False when it cannot (a wrapped sliding window), and nothing changes: start a new cache."""

    def stats(self) -> KVStats: ...

    def fork(self) -> "KVCache":
        """A second sequence that begins with the same tokens; either may then go on without the other."""

    def dump(self) -> Dump:
        """All that it holds, as it is."""

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        """Become what a cache of the same backend and policy dumped; only while empty. read(n): the next n
        bytes. Any exception leaves it unusable: drop it."""


class Backend(Protocol):
    name: str  # "mlx" | "native" | "hybrid" | "reference"
    kernels: str  # what really computes, for people: "metal", "cpu+openblas", ...
    lora: BaseLoRA | None  # what `set_lora` was given last; a cache belongs to the one it was filled under
    nbytes: int  # weights as they are held, and working memory

    def set_lora(self, base: BaseLoRA | None) -> None:
        """Change the linear layers named in it from now on, and no others; None: the model as it was, bit for
        bit. Caches filled before are stale. AdapterMismatch, and nothing changes, if it does not fit."""

    def new_cache(self, policy: TierPolicy | None = None) -> KVCache:
        """Without a policy: the backend's plain cache, nothing in fewer than 16 bits."""

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        """Append tokens (T >= 1) to the cache, in chunks. `progress(tokens_done)` is called after each
        chunk and may raise to stop: the cache then holds exactly the tokens reported done."""

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        """Append one token."""

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: HeadAdapter | None = None
    ) -> list[Step]:
        """Append one token to each of B >= 1 different caches. After a failure they may hold different
        numbers of tokens: drop them."""

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        """Append tokens and return the logits after each of them: [T, V] float32."""

    def hidden_states(self, tokens: Sequence[int], pause: Callable[[], None] | None = None) -> np.ndarray:
        """Inputs of the output head for a sequence of its own: [T, D] float32. `pause` is called after at
        most PAUSED tokens and may raise to leave."""

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """The output head, the base's pair for it included: [T, D] -> [T, V] float32."""

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """One vector for a text: the mean hidden state, [D] float32."""


@contextmanager
def under(backend: Backend, lora: BaseLoRA | None) -> Iterator[None]:
    """The backend has this base, None: no base, and its own again afterwards."""
    own = backend.lora
    if own is not lora:
        backend.set_lora(lora)
    try:
        yield
    finally:
        if own is not lora:
            backend.set_lora(own)


def untouched(backend: Backend) -> AbstractContextManager[None]:
    """The backend has no base, and has its own again afterwards."""
    return under(backend, None)
