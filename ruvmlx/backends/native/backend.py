"""The native backend runs the C decoder of neon/ on the CPU, with the CPU's vector units if neon/ supports
them.

The backend packs the weights (converts them to the layout of the C kernels) once, at loading. For products
with quantised weights, the decoder quantises activations; for products with float weights, activations stay
float32. The KV cache holds keys and values in float16; a tiered cache holds keys and values of old tokens in
8 or 4 bits.
"""

import ctypes as C
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ...kernels.decoder import Decoder
from ...kernels.decoder_weights import DecoderShape
from ...kernels.matmul import implementations
from ...kernels.micro import NotFinite, all_finite
from ...kernels.replies import ReplyWork
from ...kv.cache import PagedCache, room_for
from ...kv.policy import F16, TierPolicy
from ...kv.pool import PagePool
from ...lora.base_lora import BaseLoRA
from ...lora.quantised import Packed
from ...models.config.alibi import alibi_slopes
from ...models.config.model import Model, ModelConfig
from ...models.config.rope import rope
from ...models.weights.halves import halves, repeat_layers
from ...platform import cpu
from ...tiers import PAGE
from ..base import PAUSED, Adapters, HeadAdapter, KVCache, Step, check_tokens, each, finite, not_finite
from .storage import NativeStorage
from .weights import packed_weights

CHUNK = 256  # the maximum number of prompt tokens in one call of the decoder
# During a long call of the decoder, the calling thread handles signals and calls `waiting` at this interval.
POLL_SECONDS = 0.05
# A decoder call with fewer multiply-adds than SHORT_CALL runs in the calling thread and cannot be stopped,
# because the call is short.
SHORT_CALL = 8e9


class NativeBackend:
    """A backend that runs one model. Any thread can call the backend, but only one call can run at a time."""

    name = "native"
    caveat = ""
    # With at most 8 tokens (1 token and 7 drafted tokens), a call adds the sums of attention in the same
    # order as a single step, so the results are equal bit for bit.
    longest_draft = 7

    def __init__(
        self,
        model: Model,
        threads: int | None = None,
        chunk: int = CHUNK,
        impl: str | None = None,
        layers: int = 0,
    ):
        """layers: over 0: load only so many layers, and compute them again and again, as in MLXBackend."""
        self.config = model.config
        self.chunk = chunk
        n = self.threads = threads or cpu.physical_cores()
        part = halves(model, layers)[0] if layers else model
        weights = packed_weights(part.load_weights(), part.config, n)
        weights = replace(weights, layers=repeat_layers(weights.layers, model.config.n_layers))
        self.decoder = Decoder(decoder_shape(model.config), weights, threads=n, max_tokens=chunk, impl=impl)
        self.scratch = self.decoder.nbytes
        self.nbytes = weights.nbytes + self.scratch
        self.pool = PagePool(NativeStorage(self.decoder))
        # the approximate multiply-adds for one token: one for each parameter
        self._work = float(model.parameters)
        self._load = None if threads else cpu.OtherLoad()
        self._most_threads = n
        self.kernels = describe_kernels(n, self.decoder.matmul_name)
        self.lora: BaseLoRA | None = None

    def set_lora(self, base: BaseLoRA | None) -> None:
        if base is not None:
            base.check(self.config)
        now = base.parts if base else {}
        for place in (self.lora.pairs if self.lora else {}).keys() - now.keys():
            self.decoder.set_lora(*place, None, None)
        for place, pair in now.items():
            a, b = (x.to_words() if isinstance(x, Packed) else x for x in pair)
            self.decoder.set_lora(*place, a, b, base.scale if base else 1.0)
        self.lora = base

    def limit_threads(self, most: int) -> None:
        """Use at most `most` threads, as Threaded.limit_threads describes."""
        self._most_threads = max(1, min(most, self.threads))
        self.decoder.use_threads(self._most_threads)

    def new_cache(self, policy: TierPolicy | None = None) -> PagedCache:
        return PagedCache(self.pool, policy or F16, self.config.sliding_window or 0)

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        """Append tokens [T]; return the Step after the last token. Only the last token goes through the
        output head. For quantised weights, the activations have 8 bits here and in `decode_coarse`,
        and 16 bits in the other methods.

        While a long chunk runs, the backend also calls `progress` every POLL_SECONDS, with the number of
        tokens of the earlier chunks.
        """
        check_tokens(tokens, self.config.vocab_size)
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            last = start + len(part) == len(tokens)
            waiting = (lambda done=start: progress(done)) if progress else None
            hidden, logits = self._run(part, cache, outputs=int(last), prompt=True, waiting=waiting)
            if progress:
                progress(start + len(part))
        assert logits is not None
        return _step(logits[0], hidden[0], adapter)

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        check_tokens([token], self.config.vocab_size)
        hidden, logits = self._run([token], cache, outputs=1)
        assert logits is not None
        return _step(logits[0], hidden[0], adapter)

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        return self._decode_rows(tokens, caches, adapter, coarse=False)

    def decode_coarse(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        return self._decode_rows(tokens, caches, adapter, coarse=True)

    def _decode_rows(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters, coarse: bool
    ) -> list[Step]:
        """Append one token to each cache. Each call of the decoder runs at most `chunk` sequences, and reads
        the weights once for all of them. coarse: as in Decoder.step"""
        check_tokens(tokens, self.config.vocab_size)
        steps: list[Step] = []
        for part, held in zip(_parts(tokens, self.chunk), _parts(caches, self.chunk), strict=True):
            hidden, logits = self._step(part, [cast(PagedCache, cache) for cache in held], coarse)
            own = each(adapter, tokens)[len(steps) : len(steps) + len(part)]
            for first, last in _runs(own):
                _adapt(own[first], logits[first:last], hidden[first:last])
            steps += map(Step, logits, hidden)
        return steps

    def decode_drafted(
        self, token: int, draft: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None
    ) -> list[Step]:
        """Run `token` and the drafted tokens in one call of the decoder, as Drafting.decode_drafted
        describes."""
        held = cast(PagedCache, cache)
        held.reserve(1)
        tokens = [token, *draft[: min(held.room, self._window_room(held.offset)) - 1]]
        check_tokens(tokens, self.config.vocab_size)
        try:
            hidden, logits = self._call(
                lambda cancel: self.decoder.forward(
                    tokens, held.table, held.offset, outputs=len(tokens), cancel=cancel
                ),
                len(tokens),
            )
            _adapt(adapter, logits, hidden)
        except BaseException:
            held.abandon()
            raise
        held.advance(1)
        return list(map(Step, logits, hidden))

    def _window_room(self, offset: int) -> int:
        """Return how many tokens, at most PAGE, one call can add after `offset` tokens before the oldest page
        leaves the sliding window. All tokens of a call divide their attention into the same ranges of pages.
        A token that does not see the oldest of these pages can have other bits than after a single step."""
        window = self.config.sliding_window
        return PAGE - max(0, offset + 1 - window) % PAGE if window else PAGE

    def accept(self, cache: KVCache) -> None:
        """Add the next drafted token to the tokens of the cache, as Drafting.accept describes."""
        cast(PagedCache, cache).advance(1)

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        """Append tokens [T] and return the logits [T, V] after each token."""
        check_tokens(tokens, self.config.vocab_size)
        start = cache.offset
        try:
            parts = [self._run(part, cache, outputs=len(part)) for part in _parts(tokens, self.chunk)]
        except BaseException:
            cache.trim(cache.offset - start)
            raise
        logits = np.concatenate([logits for _, logits in parts if logits is not None])
        if adapter is not None:
            adapter.add_to_logits(logits, np.concatenate([hidden for hidden, _ in parts]))
        return finite(logits)

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        check_tokens(tokens, self.config.vocab_size)
        cache, states = cache or self.new_cache(), []
        for part in _parts(tokens, min(self.chunk, PAUSED) if pause else self.chunk):
            states.append(self._run(part, cache, outputs=len(part), head=False, waiting=pause)[0])
            if pause:
                pause()
        return np.concatenate(states)

    def first_layers(
        self, tokens: Sequence[int], cache: KVCache, waiting: Callable[[], None] | None = None
    ) -> np.ndarray:
        """Append at most `chunk` tokens [T] to the cache. Return the output of the last layer [T, D], without
        the final norm, for a backend that has only the first layers of a model."""
        check_tokens(tokens, self.config.vocab_size)
        held = cast(PagedCache, cache)
        with room_for([held], len(tokens)):
            return self._call(
                lambda cancel: self.decoder.layers(tokens, held.table, held.offset, cancel),
                len(tokens),
                waiting,
            )

    def together(self, some: Sequence[ReplyWork]) -> None:
        """Run the kernel calls of several replies in parallel, as Together.together describes."""
        if some:
            self.decoder.together(some)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(hidden, np.float32)
        try:
            return self.decoder.head(x.reshape(-1, x.shape[-1]), lora=True).reshape(*x.shape[:-1], -1)
        except NotFinite:
            raise not_finite() from None

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.hidden_states(tokens).mean(axis=0)

    def _run(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        *,
        outputs: int,
        head: bool = True,
        prompt: bool = False,
        waiting: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Append tokens to the cache in one call of the decoder. Return hidden states and, if `head`, logits
        (else None) of the last `outputs` tokens. If the call fails, the number of tokens in the cache does
        not change. prompt: as in Decoder.forward"""
        held = cast(PagedCache, cache)
        with room_for([held], len(tokens)):
            return self._call(
                lambda cancel: self.decoder.forward(
                    tokens, held.table, held.offset, outputs=outputs, head=head, prompt=prompt, cancel=cancel
                ),
                len(tokens),
                waiting,
            )

    def _step(
        self, tokens: Sequence[int], caches: Sequence[PagedCache], coarse: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append one token to each of B caches in one call of the decoder. If the call fails, the numbers of
        tokens in the caches do not change. Returns hidden states [B, D] and logits [B, V]. coarse: as in
        Decoder.step"""
        tables, offsets = [c.table for c in caches], [c.offset for c in caches]
        with room_for(caches, 1):
            return self._call(
                lambda cancel: self.decoder.step(tokens, tables, offsets, coarse=coarse, cancel=cancel),
                len(tokens),
            )

    def _call(
        self, call: Callable[[C.c_int | None], Any], tokens: int, waiting: Callable[[], None] | None = None
    ) -> Any:
        if self._load:
            free = len(cpu.usable_cpus()) - self._load.cores()
            self.decoder.use_threads(max(1, min(self._most_threads, round(free))))
        short = self._work * tokens < SHORT_CALL
        try:
            return call(None) if short else _interruptible(call, waiting)
        except NotFinite:
            raise not_finite() from None


def describe_kernels(threads: int, matmul: str | None = None) -> str:
    """Return the name of the C kernels and the number of threads, for example "native avx512vnni, 2
    threads"."""
    name = matmul or implementations()[0]
    return f"native {name}, {threads} thread{'s' if threads > 1 else ''}"


def decoder_shape(config: ModelConfig) -> DecoderShape:
    turn, scale, bias_max = rope(config), config.query_scale, config.alibi_bias_max
    return DecoderShape(
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        sliding_window=config.sliding_window or 0,
        norm_eps=config.rms_norm_eps,
        rope_frequencies=turn.frequencies,
        rope_factor=turn.factor,
        query_beta=scale.beta if scale else 0.0,
        query_span=scale.original_max_position if scale else 0.0,
        layer_norm=config.layer_norm,
        alibi_slopes=alibi_slopes(config.n_heads, bias_max) if bias_max else None,
    )


def _parts(items: Sequence[Any], n: int) -> Iterator[Sequence[Any]]:
    """Yield consecutive slices of at most n items."""
    return (items[i : i + n] for i in range(0, len(items), n))


def _interruptible(call: Callable[[C.c_int | None], Any], waiting: Callable[[], None] | None) -> Any:
    """Run a long call in a new thread, so that signals and `waiting` can stop the call. call: a function of a
    flag; the C code stops when the flag is 1. waiting: a function that is called every POLL_SECONDS and can
    raise an exception to stop the call.

    Python runs signal handlers only in its main thread, and only between two Python instructions. While the
    main thread runs C code, Python does not handle Ctrl-C, so another thread runs the C code.
    """
    cancel, result = C.c_int(0), Future[Any]()
    worker = threading.Thread(target=_settle, args=(result, call, cancel), name="ruvmlx-native", daemon=True)
    worker.start()
    try:
        while not wait([result], POLL_SECONDS).done:
            if waiting:
                waiting()
    except BaseException:
        cancel.value = 1
        wait([result])
        raise
    finally:
        worker.join()
    return result.result()


def _settle(result: Future[Any], call: Callable[[C.c_int | None], Any], cancel: C.c_int) -> None:
    try:
        result.set_result(call(cancel))
    except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
        result.set_exception(error)


def _step(logits: np.ndarray, hidden: np.ndarray, adapter: HeadAdapter | None) -> Step:
    _adapt(adapter, logits, hidden)
    return Step(logits, hidden)


def _adapt(adapter: HeadAdapter | None, logits: np.ndarray, hidden: np.ndarray) -> None:
    """Add the adapter's change to the logits in place and check that all logits are finite. Without an
    adapter there is nothing to do, because the C code has checked the logits."""
    if adapter is not None:
        adapter.add_to_logits(logits, hidden)
        if not all_finite(logits):
            raise not_finite()


def _runs(items: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each range of neighbouring items that are the same object."""
    first = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or items[end] is not items[first]:
            yield first, end
            first = end
