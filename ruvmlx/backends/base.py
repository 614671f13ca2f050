"""This module defines the Backend protocol. T: tokens; V: vocabulary size; D: hidden size.

A backend knows nothing of ratings, sessions or text. Its callers pass token ids, a cache that the backend
made and, optionally, an adapter. It returns NumPy arrays that the caller may keep and change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import RuvmlxError, UsageError
from ..kernels.replies import ReplyWork
from ..kv.cache import Dump, KVStats
from ..kv.policy import TierPolicy
from ..lora.base_lora import BaseLoRA

if TYPE_CHECKING:
    from ..sampling import Sampling

# The maximum number of tokens between two calls of `pause`. The starter model with a base LoRA
# computes them in 35 ms on one thread.
PAUSED = 32


class Step(NamedTuple):
    """The model's output after the last token."""

    logits: np.ndarray  # [V] float32, with the adapter applied
    hidden: np.ndarray  # [D] float32, the input of the output head (after the final norm)


class HeadAdapter(Protocol):
    """A low-rank change of the output head (a LoRA). It is immutable: a changed adapter is a new object."""

    @property
    def lora_a(self) -> np.ndarray: ...  # [D, r] float32

    @property
    def lora_b(self) -> np.ndarray: ...  # [r, V] float32

    @property
    def scale(self) -> float: ...

    def add_to_logits(self, logits: np.ndarray, hidden: np.ndarray) -> None:
        """Compute logits [..., V] += scale * (hidden [..., D] @ lora_a [D, r]) @ lora_b [r, V], in place."""


Adapters = HeadAdapter | None | Sequence[HeadAdapter | None]  # one adapter for all sequences, or one for each


def each(adapter: Adapters, of: Sequence[Any]) -> Sequence[HeadAdapter | None]:
    """Return the adapter of each sequence."""
    return adapter if isinstance(adapter, Sequence) else [adapter] * len(of)


class KVCache(Protocol):
    """The keys and values of one sequence."""

    @property
    def offset(self) -> int:
        """The number of tokens of the sequence, including the tokens that a sliding window has dropped."""

    @property
    def nbytes(self) -> int:
        """The number of bytes that the cache takes now."""

    def trim(self, n: int) -> bool:
        """Remove the newest n tokens. If the cut falls into tokens of 8 or 4 bits, a few more tokens are
        removed: read `offset` after the call. Returns False, and changes nothing, if the cache cannot go back
        (a wrapped sliding window). Then start a new cache."""

    def stats(self) -> KVStats: ...

    def fork(self) -> "KVCache":
        """Return a cache of a second sequence with the same tokens. The two caches are independent."""

    def dump(self) -> Dump:
        """Return the whole content of the cache, which a caller can write to disk."""

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        """Load what a cache of the same backend and policy dumped, into an empty cache. After any exception
        the cache is unusable.

        read: a function of n that returns the next n bytes
        """


class Backend(Protocol):
    name: str  # "mlx" | "native" | "reference"
    kernels: str  # the name of the compute library, for people: "metal", "cpu+openblas", ...
    caveat: str  # one line for people if the backend cannot use the GPU or our kernels; else ""
    # the installed base LoRA; a cache is valid only for the LoRA with which it was filled
    lora: BaseLoRA | None
    nbytes: int  # bytes of the weights and of the working memory
    chunk: int  # the maximum number of prompt tokens in one step

    def set_lora(self, base: BaseLoRA | None) -> None:
        """Install a base LoRA, which changes the linear layers that it names and no others. None restores the
        original model, bit for bit. Call this only between replies, because older KV caches become invalid.
        Raises AdapterMismatch, and changes nothing, if the LoRA does not fit."""

    def new_cache(self, policy: TierPolicy | None = None) -> KVCache:
        """Return an empty cache. Without a policy, return the backend's plain cache, with at least 16 bits
        for each value."""

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        """Append tokens (T >= 1) to the cache, in chunks.

        progress: a function that gets the number of tokens done after each chunk. It can raise an exception
            to stop the call. Then the cache holds exactly the number of tokens that `progress` got last.
        """

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        """Append one token to the cache and return the step after it."""

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        """Append one token to each of B >= 1 different caches. After a failure the caches may hold different
        numbers of tokens: drop them."""

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        """Append tokens. Returns the logits after each of them: [T, V] float32."""

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        """Return the inputs of the output head: [T, D] float32.

        pause: a function that is called at least every PAUSED tokens; an exception from it stops the call
        cache: the cache of the sequence that the tokens continue; None: the tokens start a new sequence
        """

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """Run the output head with the base LoRA's change: [T, D] -> [T, V] float32."""

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """Return one vector for a text: the mean hidden state, [D] float32."""


@runtime_checkable
class Together(Protocol):
    """A backend whose threads can also draw tokens and record traces, for several replies in parallel."""

    def together(self, some: Sequence[ReplyWork]) -> None:
        """Run the kernel calls of several replies in parallel, then call their `done`."""


@runtime_checkable
class Drafting(Protocol):
    """A backend that checks drafted (guessed) tokens. One pass over the weights gives all their steps."""

    # the maximum number of drafted tokens for which the steps equal single steps, bit for bit
    longest_draft: int

    def decode_drafted(
        self, token: int, draft: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None
    ) -> list[Step]:
        """Append one token. Returns the step after it, and the step after each drafted token for which the
        newest KV page has room. The cache holds the keys and values of the drafted tokens after its end. Call
        `accept` for each drafted token that the reply keeps, before you use the step after it. The next token
        overwrites the other drafted tokens."""

    def accept(self, cache: KVCache) -> None:
        """Append the next drafted token."""


class TokenStream(Protocol):
    """A stream of one reply's tokens. Call `prefill` with the prompt, `read` for each token, then `close`."""

    prefilled_at: float  # time.perf_counter() at the end of prefill; valid after the first `read`

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Append tokens (T >= 1) of the prompt to the cache. It may be called again with the next tokens.

        progress: as in Backend.prefill
        """

    def read(self) -> int:
        """Return the next token. Call this at most `limit` times. The next step is submitted before this call
        waits for its token, unless the cache could not undo that step.

        Raises RuvmlxError if the logits were NaN or infinite.
        """

    def take_hidden(self) -> np.ndarray:
        """Return [n, D] float32: the hidden states from which the last n tokens were drawn. n: tokens read
        since the last call."""

    def close(self) -> None:
        """Undo the step that runs ahead. Then the cache holds the prompt and all tokens read except the last.
        `take_hidden` may still be called. A second call does nothing."""


@runtime_checkable
class Streaming(Protocol):
    """A backend that can run the decode loop and draw the tokens itself. It does so if `streams` is true."""

    streams: bool

    def stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: "Sampling", limit: int
    ) -> TokenStream:
        """Return a stream for a reply of at most `limit` tokens. The reply follows the tokens in the cache
        and those that `prefill` will add."""


def adapted_logits(
    adapter: HeadAdapter | None, hidden: np.ndarray, head: Callable[[np.ndarray], np.ndarray], chunk: int = 64
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (hidden [t, D], logits [t, V] with the adapter applied) for `chunk` tokens at a time."""
    for start in range(0, len(hidden), chunk):
        h = np.ascontiguousarray(hidden[start : start + chunk])
        logits = head(h)
        if adapter is not None:
            adapter.add_to_logits(logits, h)
        yield h, logits


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UsageError unless there is at least one token and all tokens are in the vocabulary."""
    if not len(tokens):
        raise UsageError("nothing to run: the prompt has no tokens")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UsageError(f"token {bad} is outside the vocabulary of {vocab_size} tokens")


def finite(values: np.ndarray) -> np.ndarray:
    """Return the same values. Raises RuvmlxError if one of them is NaN or infinite."""
    if not np.isfinite(values).all():
        raise not_finite()
    return values


def not_finite() -> RuvmlxError:
    return RuvmlxError(
        "the model answered NaN or infinity instead of logits; its weights are damaged or overflow in "
        "this precision: try another model file, or another backend with --backend"
    )


@contextmanager
def with_lora(backend: Backend, lora: BaseLoRA | None) -> Iterator[None]:
    """In the block the backend uses this base LoRA (None: the original model). After the block it uses its
    former base LoRA again."""
    own = backend.lora
    if own is not lora:
        backend.set_lora(lora)
    try:
        yield
    finally:
        if own is not lora:
            backend.set_lora(own)


@contextmanager
def preserve_lora(backend: Backend) -> Iterator[None]:
    """After the block the backend has its former base LoRA again, whichever LoRA the block installed."""
    own = backend.lora
    try:
        yield
    finally:
        if backend.lora is not own:
            backend.set_lora(own)


def original_model(backend: Backend) -> AbstractContextManager[None]:
    """In the block the backend runs the original model. After the block it has its former base LoRA."""
    return with_lora(backend, None)
