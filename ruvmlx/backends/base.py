"""The Backend protocol. T tokens, V vocabulary, D hidden size.

A backend knows nothing of ratings, sessions or text. It is handed token ids, a cache that it made
itself and, perhaps, an adapter; it hands back NumPy arrays that the caller may keep and change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import RuvmlxError, UsageError
from ..kv.cache import Dump, KVStats
from ..kv.policy import TierPolicy
from ..lora.base_lora import BaseLoRA

if TYPE_CHECKING:
    from ..sampling import Sampling

PAUSED = 32  # tokens that are read without a pause: 35 ms of the starter model under a base, on one thread


class Step(NamedTuple):
    """What the model says after the last token."""

    logits: np.ndarray  # [V] float32, the adapter applied
    hidden: np.ndarray  # [D] float32, input of the output head (after the final norm)


class HeadAdapter(Protocol):
    """A low-rank change of the output head, as a backend sees it. Its numbers never change: another change of
    the head is another object."""

    @property
    def lora_a(self) -> np.ndarray: ...  # [D, r] float32

    @property
    def lora_b(self) -> np.ndarray: ...  # [r, V] float32

    @property
    def scale(self) -> float: ...

    def add_to_logits(self, logits: np.ndarray, hidden: np.ndarray) -> None:
        """logits [..., V] += scale * (hidden [..., D] @ lora_a [D, r]) @ lora_b [r, V], in place."""


Adapters = HeadAdapter | None | Sequence[HeadAdapter | None]  # one for all sequences, or one for each


def each(adapter: Adapters, of: Sequence[Any]) -> Sequence[HeadAdapter | None]:
    """The adapter of each sequence."""
    return adapter if isinstance(adapter, Sequence) else [adapter] * len(of)


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
    name: str  # "mlx" | "native" | "reference"
    kernels: str  # what really computes, for people: "metal", "cpu+openblas", ...
    caveat: str  # one line for people, where this machine's GPU or our kernels cannot be used; else ""
    lora: BaseLoRA | None  # what `set_lora` was given last; a cache belongs to the one it was filled under
    nbytes: int  # weights as they are held, and working memory
    chunk: int  # tokens of a prompt that it reads at a time, at most

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
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
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


class TokenStream(Protocol):
    """A reply as it is drawn: `prefill` the prompt, `read` its tokens, `close`."""

    prefilled_at: float  # time.perf_counter() when the prompt had been read; known once a token was

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Append tokens (T >= 1) of the prompt to the cache; may be called again with the next ones.
        `progress` as in Backend.prefill."""

    def read(self) -> int:
        """Return the next token; call it at most `limit` times. The step after this token is submitted before
        the call waits for the token, unless that step could not be undone.

        RuvmlxError when its logits were NaN or infinite."""

    def hidden(self) -> np.ndarray:
        """[n, D] float32: what the n tokens that were read since the last call were drawn from."""

    def close(self) -> None:
        """Undo the step ahead. The cache then holds the prompt and all tokens read except the last.
        `hidden` may still be called; a second call does nothing."""


@runtime_checkable
class Streaming(Protocol):
    """A backend that owns the loop of a reply, and draws its tokens itself, if `streams`."""

    streams: bool

    def stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: "Sampling", limit: int
    ) -> TokenStream:
        """A reply of at most `limit` tokens that follows what is in the cache and what will be prefilled."""


def adapted_logits(
    adapter: HeadAdapter | None, hidden: np.ndarray, head: Callable[[np.ndarray], np.ndarray], chunk: int = 64
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (hidden [t, D], logits [t, V] with the adapter applied), a chunk of tokens at a time."""
    for start in range(0, len(hidden), chunk):
        h = np.ascontiguousarray(hidden[start : start + chunk])
        logits = head(h)
        if adapter is not None:
            adapter.add_to_logits(logits, h)
        yield h, logits


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """UsageError unless there is at least one token and all of them are in the vocabulary."""
    if not len(tokens):
        raise UsageError("nothing to run: the prompt has no tokens")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UsageError(f"token {bad} is outside the vocabulary of {vocab_size} tokens")


def finite(values: np.ndarray) -> np.ndarray:
    """The same values; RuvmlxError if one of them is NaN or infinite."""
    if not np.isfinite(values).all():
        raise not_finite()
    return values


def not_finite() -> RuvmlxError:
    return RuvmlxError(
        "the model answered NaN or infinity instead of logits; its weights are damaged or overflow in "
        "this precision: try another model file, or another backend with --backend"
    )


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
