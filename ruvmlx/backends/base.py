"""The Backend protocol. T tokens, V vocabulary, D hidden size.

A backend knows nothing of ratings, sessions or text. Its callers pass token ids, a cache that it made itself
and, optionally, an adapter; it returns NumPy arrays that the caller may keep and change.
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

PAUSED = (
    32  # most tokens between two calls of `pause`: 35 ms of the starter model with a base LoRA, on one thread
)


class Step(NamedTuple):
    """The model's output after the last token."""

    logits: np.ndarray  # [V] float32, the adapter applied
    hidden: np.ndarray  # [D] float32, input of the output head (after the final norm)


class HeadAdapter(Protocol):
    """A low-rank change of the output head. Immutable: a changed adapter is a new object."""

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
        """Tokens of the sequence so far, including those that a sliding window has dropped."""

    @property
    def nbytes(self) -> int:
        """Bytes that the cache occupies now."""

    def trim(self, n: int) -> bool:
        """Remove the newest n tokens, and a few more where they were kept in 8 or 4 bits: `offset` tells how
        many are left. False when it cannot (a wrapped sliding window); then nothing changes: start a new
        cache."""

    def stats(self) -> KVStats: ...

    def fork(self) -> "KVCache":
        """A second sequence with the same tokens; afterwards the two are independent."""

    def dump(self) -> Dump:
        """The whole content, to be written to disk."""

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        """Load what a cache of the same backend and policy dumped, into an empty cache. read(n) returns the
        next n bytes. After any exception the cache is unusable: drop it."""


class Backend(Protocol):
    name: str  # "mlx" | "native" | "reference"
    kernels: str  # the compute library, for people: "metal", "cpu+openblas", ...
    caveat: str  # one line for people if this machine's GPU or our kernels cannot be used; else ""
    lora: BaseLoRA | None  # the installed base LoRA; a cache is valid only for the one it was filled with
    nbytes: int  # weights in memory, and working memory
    chunk: int  # most prompt tokens that it reads at a time

    def set_lora(self, base: BaseLoRA | None) -> None:
        """Install the base LoRA: it changes the linear layers that it names, and no others; None restores the
        original model, bit for bit. Call only between replies: older KV caches become stale. AdapterMismatch
        if it does not fit; then nothing changes."""

    def new_cache(self, policy: TierPolicy | None = None) -> KVCache:
        """An empty cache. Without a policy: the backend's plain cache with at least 16 bits for each
        value."""

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

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        """Inputs of the output head: [T, D] float32. `pause` is called at least every PAUSED tokens and may
        raise to stop. cache: of the sequence that the tokens continue; None: they are a sequence of their
        own."""

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """The output head with the base LoRA's change: [T, D] -> [T, V] float32."""

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """One vector for a text: the mean hidden state, [D] float32."""


@runtime_checkable
class Together(Protocol):
    """A backend whose threads can also draw tokens and record traces, for several replies in parallel."""

    def together(self, some: Sequence[ReplyWork]) -> None:
        """Run the kernel calls of several replies in parallel, then their `done`."""


class TokenStream(Protocol):
    """The tokens of one reply: `prefill` the prompt, `read` token by token, `close`."""

    prefilled_at: float  # time.perf_counter() at the end of prefill; valid after the first `read`

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Append tokens (T >= 1) of the prompt to the cache; may be called again with the next ones.
        `progress` as in Backend.prefill."""

    def read(self) -> int:
        """Return the next token; call it at most `limit` times. The step after this token is submitted before
        the call waits for the token, unless that step could not be undone.

        RuvmlxError when its logits were NaN or infinite."""

    def hidden(self) -> np.ndarray:
        """[n, D] float32: the hidden states from which the n tokens read since the last call were drawn."""

    def close(self) -> None:
        """Undo the step ahead. The cache then holds the prompt and all tokens read except the last.
        `hidden` may still be called; a second call does nothing."""


@runtime_checkable
class Streaming(Protocol):
    """A backend that can run the decode loop and draw the tokens itself; it does so if `streams`."""

    streams: bool

    def stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: "Sampling", limit: int
    ) -> TokenStream:
        """A reply of at most `limit` tokens after the tokens in the cache and those that will be
        prefilled."""


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
def with_lora(backend: Backend, lora: BaseLoRA | None) -> Iterator[None]:
    """In the block the backend uses this base LoRA (None: the original model); afterwards its own again."""
    own = backend.lora
    if own is not lora:
        backend.set_lora(lora)
    try:
        yield
    finally:
        if own is not lora:
            backend.set_lora(own)


@contextmanager
def restored(backend: Backend) -> Iterator[None]:
    """Whatever base LoRA the block installs, afterwards the backend has its own again."""
    own = backend.lora
    try:
        yield
    finally:
        if backend.lora is not own:
            backend.set_lora(own)


def untouched(backend: Backend) -> AbstractContextManager[None]:
    """In the block the backend runs the original model; afterwards with its own base LoRA again."""
    return with_lora(backend, None)
