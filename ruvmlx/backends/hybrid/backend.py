"""This module is the hybrid backend: one side writes the replies, and both sides share the other work.

On a Mac the sides are MLX on the GPU and the C decoder on the CPU's cores. The thread "beside" runs work of
the other side while the caller's thread writes a reply. If the main side fails, the other side becomes the
main side, and the engine reads the tokens of each reply in progress again there (engine/side_change.py).
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from ...errors import SideFailed
from ...pausing import Pause, stop_when
from ...sampling import Sampling
from ..base import REPLIES, Backend, HeadAdapter, KVCache, SideFailure, Step, TokenStream
from .placed import PlacedBackend
from .placement import Placement, facts_of
from .side import DECODE, HEAD, READ, CallerFunction, Side, SideCall, overlap

DRAFTED = "drafted"  # the operation that checks drafted tokens; no placement uses its cost
MEASURED_TOKENS = 32  # the number of tokens and rows with which `measure_side` measures READ and HEAD
# Attributes and methods that a backend can have in addition to base.Backend. The hybrid backend has those of
# its main side.
FACTS = "config", "shape", "pool", "streams", "longest_draft", "threads", "gpu_memory"
CALLS = "together", "limit_threads", "accept"

T = TypeVar("T")


class HybridBackend(PlacedBackend):
    """Two backends with one model. This object is the backend for replies; `worker` returns a backend for
    another kind of work. The object also has those optional methods of base.py that its main side has."""

    def __init__(self, placement: Placement):
        super().__init__(placement, REPLIES)
        sides = placement.main.backend, placement.other.backend
        self.caveat = " ".join(filter(None, (side.caveat for side in sides)))
        self.scratch = sum(getattr(side, "scratch", 0) for side in sides)
        self._told: set[str] = set()  # names of the failed sides that `take_failures` has returned
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._jobs: set[Future[Any]] = set()
        placement.on_change = self._adopt
        self._adopt()

    def _adopt(self) -> None:
        """Take over the optional attributes and methods of the main side."""
        main, before = self.placement.main, vars(self).get("pool")
        alive = [s for s in (main, self.placement.other) if s.failure is None]
        self.kernels = " + ".join(side.backend.kernels for side in alive)
        self.chunk = main.backend.chunk
        for name in (*FACTS, *CALLS, "stream", "decode_drafted"):
            vars(self).pop(name, None)
            if hasattr(main.backend, name):
                setattr(self, name, self._option_of(main, name))
        pool = vars(self).get("pool")
        if pool is not None and before is not None:
            pool.budget, pool.reclaim, pool.least = before.budget, before.reclaim, before.least

    def _option_of(self, main: Side, name: str) -> Any:
        """Return the optional attribute of the main side, or a function that calls its optional method."""
        if name in FACTS:
            return getattr(main.backend, name)
        if name in CALLS:
            return lambda *args: main.call(lambda backend: getattr(backend, name)(*args))
        return self._stream if name == "stream" else self._decode_drafted

    def _decode_drafted(
        self, token: int, draft: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None
    ) -> list[Step]:
        return self.run(lambda b: b.decode_drafted(token, draft, cache, adapter), DRAFTED, 1, cache)

    def _stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: Sampling, limit: int, draws: int = 0
    ) -> TokenStream:
        stream = self.run(lambda b: b.stream(cache, adapter, sampling, limit, draws), "", 0, cache)
        return PlacedStream(self, stream, cache)

    # -- base.TwoSided -------------------------------------------------------------------------------

    def worker(self, kind: str) -> Backend:
        """Return a backend for one kind of work, without a base LoRA. Any thread can call this backend."""
        return PlacedBackend(self.placement, kind)

    def start_beside(self, kind: str, work: Callable[[Backend, Pause], T]) -> Future[T] | None:
        """Run work(backend, pause) in the thread "beside" if this kind of work is placed on the other side.
        Return None if the work is placed on the main side, where it would delay replies."""
        if self.placement.side_of(kind) is self.placement.main:
            return None
        job = self._thread.submit(work, self.worker(kind), stop_when(self._closing))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def take_failures(self) -> list[SideFailure]:
        """Return the failures that no earlier call has returned."""
        sides = self.placement.main, self.placement.other
        found = [s.failure for s in sides if s.failure is not None and s.name not in self._told]
        self._told |= {failure.side for failure in found}
        return found

    def finish(self) -> dict[str, Any]:
        """Stop the work in the thread "beside". Return facts for the log: where each kind of work ran, its
        costs, and the seconds in which both sides worked at the same time."""
        self._closing.set()
        wait(list(self._jobs))
        self._closing.clear()
        sides = self.placement.main, self.placement.other
        return {
            **facts_of(self.placement),
            "overlap_s": round(overlap([*sides[0].intervals, *sides[1].intervals]), 3),
            "failed": [side.name for side in sides if side.failure is not None],
        }


class PlacedStream:
    """A token stream of the main side (base.TokenStream)."""

    def __init__(self, backend: PlacedBackend, stream: TokenStream, cache: KVCache):
        self._backend, self._stream, self._cache = backend, stream, cache
        self.prefilled_at = stream.prefilled_at

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        told = CallerFunction(progress)
        self._backend.run(
            lambda _: self._stream.prefill(tokens, told.call), READ, len(tokens), self._cache, told=told
        )

    def read(self) -> int:
        token = self._backend.run(lambda _: self._stream.read(), DECODE, 1, self._cache)
        self.prefilled_at = self._stream.prefilled_at
        return token

    def take_hidden(self) -> np.ndarray:
        return self._backend.run(lambda _: self._stream.take_hidden(), "", 0, self._cache)

    def close(self) -> None:
        if not self._backend.is_lost(self._cache):
            self._stream.close()


def join_sides(one: Backend, two: Backend, are_apart: bool) -> HybridBackend:
    """Return the hybrid backend of two backends with the same model. The side that decodes sooner writes the
    replies. are_apart: True if the backends use two devices"""
    sides = Side(one), Side(two)
    sides[0].partner, sides[1].partner = sides[1], sides[0]
    for side in sides:
        measure_side(side)
    main, other = sorted(sides, key=lambda side: side.costs.get(DECODE, float("inf")))
    return HybridBackend(Placement(main, other, are_apart))


def measure_side(side: Side) -> None:
    """Measure the costs of a side with a few tokens: tens of milliseconds with a small model. If the side
    fails, it is not used."""

    def measure(backend: Any) -> None:
        cache, tokens = backend.new_cache(), list(range(MEASURED_TOKENS))
        backend.prefill(tokens, cache)  # the first call also compiles and starts threads
        states = []
        calls: list[tuple[str, int, Callable[[], Any]]] = [
            (READ, len(tokens), lambda: states.append(backend.hidden_states(tokens, cache=cache))),
            (HEAD, len(tokens), lambda: backend.head(states[0])),
            *[(DECODE, 1, lambda: backend.decode(1, cache))] * 3,
        ]
        for operation, n, call in calls:
            begun = perf_counter()
            call()
            cost = (perf_counter() - begun) / n
            side.costs[operation] = min(cost, side.costs.get(operation, cost))

    with contextlib.suppress(SideFailed):
        side.run(SideCall("opening", None), measure)
