"""This module defines the protocol of all backends. In shapes, T is the number of tokens, V the vocabulary
size, D the hidden size.

A backend knows nothing of ratings, sessions or text. The callers of a backend pass token ids, a KV cache that
the backend made and, optionally, an adapter of the output head. A backend returns logits and hidden states as
NumPy arrays that the caller can keep and change.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from ..errors import RuvmlxError, UsageError
from ..kernels.replies import ReplyWork
from ..kv.cache import Dump, KVStats
from ..kv.policy import TierPolicy
from ..kv.pool import PagePool
from ..lora.base_lora import BaseLoRA
from ..pausing import Pause

if TYPE_CHECKING:
    from ..sampling import Sampling

# The maximum number of tokens between two calls of `pause`. With a base LoRA and one thread, the starter
# model computes PAUSED tokens in 35 ms.
PAUSED = 32
# The kinds of work that a backend with two sides can place on either side. QUESTIONS: questions and other
# texts that are embedded. KL: measurements of the KL probe. SAMPLES: replies that no user sees.
REPLIES, QUESTIONS, KL, SAMPLES = "replies", "questions", "kl", "samples"

T = TypeVar("T")


class Step(NamedTuple):
    """The model's output after the last token of a sequence."""

    logits: np.ndarray  # [V] float32, the logits of the next token, with the adapter applied
    hidden: np.ndarray  # [D] float32, the hidden state that the output head reads (after the final norm)


class HeadAdapter(Protocol):
    """A low-rank change of the output head (a LoRA). An adapter object is immutable: training makes a new
    object."""

    @property
    def lora_a(self) -> np.ndarray: ...  # [D, r] float32

    @property
    def lora_b(self) -> np.ndarray: ...  # [r, V] float32

    @property
    def scale(self) -> float: ...

    def add_to_logits(self, logits: np.ndarray, hidden: np.ndarray) -> None:
        """Compute logits [..., V] += scale * (hidden [..., D] @ lora_a [D, r]) @ lora_b [r, V], in place."""


# one adapter for all sequences, or a list with one adapter for each sequence
Adapters = HeadAdapter | None | Sequence[HeadAdapter | None]


def each(adapter: Adapters, of: Sequence[Any]) -> Sequence[HeadAdapter | None]:
    """Return one adapter (or None) for each item of `of`: the adapters of the list `adapter`, or the single
    adapter repeated."""
    return adapter if isinstance(adapter, Sequence) else [adapter] * len(of)


class KVCache(Protocol):
    """A cache of the keys and values of one sequence."""

    @property
    def offset(self) -> int:
        """Return the number of tokens of the sequence. The number includes the tokens that a sliding window
        has dropped."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of memory that the cache takes now."""

    def trim(self, n: int) -> bool:
        """Remove the newest n tokens. A cache with KV pages can remove more than n tokens (for example, if
        the last kept token would be inside a page of 8 or 4 bits), so read `offset` after the call. If the
        cache cannot remove the tokens (for example, a sliding window has dropped older tokens that the next
        token would see), return False and change nothing; the caller must then start a new cache."""

    def stats(self) -> KVStats: ...

    def fork(self) -> "KVCache":
        """Return a cache of a second sequence with the same tokens. Later changes of one cache do not change
        the other cache."""

    def dump(self) -> Dump:
        """Return the whole content of the cache, which a caller can write to disk."""

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        """Fill this empty cache with the content that `dump` of a cache with the same backend and policy
        returned. After an exception, do not use the cache.

        read: a function of n that returns the next n bytes of the dump's parts
        """


@runtime_checkable
class Holding(Protocol):
    """A cache with KV pages. `hold` announces n tokens that the caller will append in several calls, so that
    the cache gets the same bits as from one call."""

    def hold(self, n: int) -> None: ...


class Backend(Protocol):
    name: str  # "mlx" | "native" | "hybrid" | "reference"
    kernels: str  # the name of the compute library, for people: "metal", "cpu+openblas", ...
    # a line for the user if the open model has a limit (no GPU, no kernels of ruvmlx, missing features, a
    # small kv_budget); else ""
    caveat: str
    # the installed base LoRA; a cache is valid only for base LoRAs with the same `of_keys` as the LoRA with
    # which the cache was filled
    lora: BaseLoRA | None
    nbytes: int  # the number of bytes of the weights (native: with the decoder's working memory)
    chunk: int  # the maximum number of prompt tokens in one step of `prefill`

    @property
    def pool(self) -> PagePool | None:
        """Return the KV pages of all caches; None: the caches have no pages, so no budget limits them."""

    def set_lora(self, base: BaseLoRA | None) -> None:
        """Install a base LoRA, which changes only the linear layers that it names. With None, restore the
        original model, bit for bit. Call this method only between replies, because the KV caches that were
        filled before become invalid if the LoRA changes a layer below the output head. If the LoRA does not
        fit the model, raise AdapterMismatch and change nothing."""

    def new_cache(self, policy: TierPolicy | None = None) -> KVCache:
        """Return an empty cache. Without a policy, return a cache in which no number has fewer than 16
        bits."""

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        """Append tokens (T >= 1) to the cache, in chunks.

        progress: a function that is called after each chunk, and possibly within a chunk, with the number of
            tokens appended so far. If `progress` raises an exception, the call stops, and the cache holds
            exactly the tokens that `progress` was last told of.
        """

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        """Append one token to the cache and return the Step (logits and hidden state) after this token."""

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        """Append one token to each of B >= 1 different caches. After a failure, the caller must drop the
        caches, because some can already hold their new token."""

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        """Append tokens to the cache. Return the logits after each of the new tokens: [T, V] float32."""

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        """Return the hidden state of each token (the input of the output head): [T, D] float32.

        pause: a function that is called at least once for each PAUSED tokens; an exception that it raises
            stops the call
        cache: the cache of the sequence that the tokens continue; None: the tokens start a new sequence
        """

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """Return the logits [T, V] float32 of hidden states [T, D], from the output head with the base LoRA's
        change."""

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """Return one vector for the text `tokens`: the mean of its tokens' hidden states, [D] float32."""


@runtime_checkable
class Embedding(Protocol):
    """A backend that computes vectors of texts and writes no text: an encoder."""

    def text_vectors(self, texts: Sequence[Sequence[int]]) -> Generator[None, None, list[np.ndarray]]:
        """Return one vector [D] float32 of length 1 for each text. The vectors have the order of `texts`; a
        text is a list of token ids. The generator yields every few milliseconds, so that other work can
        run."""


@runtime_checkable
class Together(Protocol):
    """A backend whose threads can also run other C functions (draw tokens, record traces) for several replies
    in parallel."""

    def together(self, some: Sequence[ReplyWork]) -> None:
        """Run the kernel calls of several replies in parallel. The caller then calls `ReplyWork.finish` of
        each call, so that the failed call of one reply does not end another reply."""


@runtime_checkable
class Threaded(Protocol):
    """A backend whose number of threads can be limited. The number changes the speed, and no bit of a
    result. threads: the number of threads that the backend has."""

    threads: int

    def limit_threads(self, most: int) -> None:
        """Use at most `most` threads from the next call on."""


@runtime_checkable
class Drafting(Protocol):
    """A backend that checks drafted (guessed) tokens. The backend reads the weights once to compute the steps
    of all drafted tokens."""

    # the maximum number of drafted tokens in one call for which the steps equal, bit for bit, the steps of
    # one `decode` call for each token
    longest_draft: int

    def decode_drafted(
        self, token: int, draft: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None
    ) -> list[Step]:
        """Append `token`. Return the Step (logits and hidden state) after `token`, and the Step after each
        drafted token, except the last drafted tokens if the cache would have to make or demote a KV page for
        them. The keys and values of the drafted tokens are stored after the cache's last token. Call `accept`
        for each drafted token that the reply keeps, before you use the step after this token. The next
        decoded token overwrites the keys and values of drafted tokens that were not accepted."""

    def accept(self, cache: KVCache) -> None:
        """Add the first drafted token that is not yet accepted to the tokens of the cache."""


class TokenStream(Protocol):
    """A stream of one reply's tokens. Call `prefill` with the prompt, then `read` for each token of the
    reply, then `close`."""

    prefilled_at: float  # time.perf_counter() at the end of prefill; valid after the first `read`

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Append tokens (T >= 1) of the prompt to the cache. A caller can pass a long prompt in several
        calls.

        progress: as in Backend.prefill
        """

    def read(self) -> int:
        """Return the next token. Call this method at most `limit` times (the argument of Streaming.stream).
        The method submits the next decode step to the device before it waits for the token of the current
        step. The method does not do this for the last of `limit` tokens, or if the cache could not undo the
        next step.

        Raises RuvmlxError if one of the token's logits was NaN or infinite.
        """

    def take_hidden(self) -> np.ndarray:
        """Return [n, D] float32: the hidden states from which the n tokens were drawn that `read` returned
        since the last `take_hidden`."""

    def close(self) -> None:
        """Remove the token of the decode step that runs ahead of `read` from the cache. After the call, the
        cache holds the prompt and all tokens that `read` returned, except the last of these tokens. A caller
        can still call `take_hidden` after `close`. A second call of `close` does nothing."""


@runtime_checkable
class Streaming(Protocol):
    """A backend that can run the decode loop and draw the tokens itself. The engine calls `stream` only if
    `streams` is True."""

    streams: bool

    def stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: "Sampling", limit: int, draws: int = 0
    ) -> TokenStream:
        """Return a stream for a reply of at most `limit` tokens. The reply continues the tokens in the cache
        and the tokens that `prefill` will add. draws: the number of the reply's tokens that were drawn
        before; the stream goes on with the random number after theirs"""


class SideFailure(NamedTuple):
    """The failure of one side of a backend with two sides. why: the error's class and text."""

    side: str
    why: str

    @property
    def line(self) -> str:
        """Return a line for the user."""
        return f"{self.side} failed ({self.why}). The other side goes on alone until the next start."


@runtime_checkable
class TwoSided(Protocol):
    """A backend that shares the work on one model between two backends (its sides)."""

    def worker(self, kind: str) -> Backend:
        """Return a backend for one kind of work, for example KL. Any thread can call this backend."""

    def start_beside(self, kind: str, work: Callable[[Backend, Pause], T]) -> Future[T] | None:
        """Run work(backend, pause) in another thread while the caller's thread writes replies. Return None if
        this kind of work would delay the replies; the caller then does the work later."""

    def is_lost(self, cache: KVCache) -> bool:
        """Return True if the side that made this cache has failed."""

    def take_failures(self) -> list[SideFailure]:
        """Return the failures that no earlier call has returned."""

    def finish(self) -> dict[str, Any]:
        """Stop the work in the other thread. Return facts about the work of both sides, for the log."""


def worker(backend: Backend, kind: str) -> Backend:
    """Return the backend that does this kind of work: `backend` itself, unless it has two sides."""
    return backend.worker(kind) if isinstance(backend, TwoSided) else backend


ADAPTED_TOKENS = 64  # the number of tokens whose logits `adapted_logits` computes at a time


def adapted_logits(
    adapter: HeadAdapter | None, hidden: np.ndarray, head: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (hidden [t, D], logits [t, V] with the adapter applied) for t tokens at a time: t =
    ADAPTED_TOKENS, or less in the last pair."""
    for start in range(0, len(hidden), ADAPTED_TOKENS):
        h = np.ascontiguousarray(hidden[start : start + ADAPTED_TOKENS])
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
    """Return `values` unchanged. Raises NotFiniteLogits if one of the values is NaN or infinite."""
    if not np.isfinite(values).all():
        raise not_finite()
    return values


class NotFiniteLogits(RuvmlxError):
    """The logits of a model, or its hidden states, have NaN or infinity."""


def not_finite() -> NotFiniteLogits:
    return NotFiniteLogits(
        "the model answered NaN or infinity instead of logits; its weights are damaged or overflow in "
        "this precision: try another model file, or another backend with --backend"
    )


@contextmanager
def with_lora(backend: Backend, lora: BaseLoRA | None) -> Iterator[None]:
    """In the `with` block, the backend uses the base LoRA `lora` (None: the original model). After the block,
    the backend uses the base LoRA from before the block again."""
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
    """After the `with` block, the backend uses the base LoRA from before the block again, whichever LoRA the
    block installed."""
    own = backend.lora
    try:
        yield
    finally:
        if backend.lora is not own:
            backend.set_lora(own)


def original_model(backend: Backend) -> AbstractContextManager[None]:
    """In the `with` block, the backend runs the original model, without a base LoRA. After the block, the
    backend uses the base LoRA from before the block again."""
    return with_lora(backend, None)
