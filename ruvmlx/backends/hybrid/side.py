"""This module holds one side of the hybrid backend: a backend, the costs of its work, and its failure."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from ...errors import GPUFailed, RuvmlxError, SideFailed
from ...lora.base_lora import BaseLoRA
from ...text import one_line
from ..base import Backend, KVCache, SideFailure

# Operations whose cost is measured, in seconds per token. READ: the tokens of a prompt or text. DECODE: one
# step (one token of each sequence). HEAD: rows of the output head.
READ, DECODE, HEAD = "read", "decode", "head"
WEIGHT = 0.2  # the weight of the newest call in the mean of an operation's cost
FEW = 16  # calls with fewer tokens do not change the cost of READ and HEAD, because fixed costs dominate them
KEPT = 4096  # the number of newest intervals that a pair of sides keeps

T = TypeVar("T")


class Interval(NamedTuple):
    """The time in which one side worked: seconds of time.perf_counter()."""

    side: str
    kind: str  # the kind of work (placement.py)
    begun: float
    ended: float


class CallerFunction:
    """A function of the caller that a backend calls during its work. `error` is the exception that the
    function raised, so that this exception does not count as a failure of the backend."""

    def __init__(self, tell: Callable[..., None] | None):
        self._tell = tell
        self.error: BaseException | None = None
        self.call = None if tell is None else self._call

    def _call(self, *args: Any) -> None:
        assert self._tell is not None
        try:
            self._tell(*args)
        except BaseException as error:
            self.error = error
            raise


NO_FUNCTION = CallerFunction(None)


class Side:
    """One backend of the hybrid backend. Only one call of the backend runs at a time.

    name: "mlx" or "native"
    costs: {operation: mean seconds per token}
    failure: the reason why the side is not used any more; None while the side works
    partner: the other side; None: no other side can do the work of this side
    """

    def __init__(self, backend: Backend):
        self.backend, self.name = backend, backend.name
        self.costs: dict[str, float] = {}
        self.failure: SideFailure | None = None
        self.partner: Side | None = None
        self.intervals = deque[Interval](maxlen=KEPT)
        self._lock = threading.RLock()

    def owns(self, cache: KVCache) -> bool:
        """Return True if this side can continue the cache. A cache with pages belongs to the side with its
        pool; only MLX makes caches without pages."""
        pool = getattr(cache, "pool", None)
        if pool is None:
            return self.name == "mlx"
        return pool is self.backend.pool

    def call(self, work: Callable[[Any], T]) -> T:
        """Return work(backend). Errors of the work are not failures of the side."""
        with self._lock:
            return work(self.backend)

    def run(self, call: "SideCall", work: Callable[[Any], T]) -> T:
        """Return work(backend), with the call's base LoRA installed, and measure the cost. Raise SideFailed
        if the side has failed, now or earlier, and the other side works. An error that says that the request
        is wrong, and the caller's own exception, pass through."""
        with self._lock:
            if self.failure is not None:
                raise SideFailed(self.failure.line)
            try:
                if self.backend.lora is not call.lora:
                    self.backend.set_lora(call.lora)
                with self._measuring(call):
                    return work(self.backend)
            except Exception as error:
                if call.told.error is error or is_of_request(error) or not self._can_fail:
                    raise
                self.failure = SideFailure(self.name, f"{type(error).__name__}: {one_line(str(error))}")
                raise SideFailed(self.failure.line) from error

    @property
    def _can_fail(self) -> bool:
        return self.partner is not None and self.partner.failure is None

    @contextmanager
    def _measuring(self, call: "SideCall") -> Iterator[None]:
        begun = perf_counter()
        yield
        ended = perf_counter()
        if call.operation:
            self.intervals.append(Interval(self.name, call.kind, begun, ended))
            if call.tokens >= (FEW if call.operation in (READ, HEAD) else 1):
                self.measure(call.operation, (ended - begun) / call.tokens)

    def measure(self, operation: str, cost: float) -> None:
        """Add the cost of one call, in seconds per token, to the mean cost of its operation."""
        known = self.costs.get(operation, cost)
        self.costs[operation] = known + WEIGHT * (cost - known)


class SideCall(NamedTuple):
    """One call of a side. operation: "" to measure nothing. told: the caller's function in the call."""

    kind: str
    lora: BaseLoRA | None
    operation: str = ""
    tokens: int = 0
    told: CallerFunction = NO_FUNCTION


def is_of_request(error: Exception) -> bool:
    """Return True if the error says that the request is wrong, and not that the side failed. Backends raise
    RuvmlxError itself, not a subclass, for logits that are not finite."""
    return isinstance(error, RuvmlxError) and type(error) not in (RuvmlxError, GPUFailed)


def overlap(intervals: Sequence[Interval]) -> float:
    """Return the number of seconds in which both sides worked at the same time."""
    ends = sorted([(i.begun, 1, i.side) for i in intervals] + [(i.ended, -1, i.side) for i in intervals])
    running: dict[str, int] = {}
    total = last = 0.0
    for at, step, side in ends:
        if sum(count > 0 for count in running.values()) > 1:
            total += at - last
        running[side], last = running.get(side, 0) + step, at
    return total
