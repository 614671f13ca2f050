"""This module decides when a request starts: its KV caches must fit into the memory budget beside the caches
of the running requests.

Before the prompt is read, admission computes the bytes of the request's caches with the whole prompt and the
longest allowed replies (kv/need.py). Admission does not count the sessions that are kept for later requests
(sessions.py), because the pool of KV pages can evict them. A request that can never fit fails with
CacheTooLarge. A request that does not fit now waits until running requests end. If the wait exceeds a limit
of the request's `patience` (types.py), or if no request runs, the request fails with MemoryBusy.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import CacheTooLarge, MemoryBusy
from ..kv.cache import held_bytes
from ..kv.need import CacheShape, Growth
from ..kv.policy import F16, MAX_LEVEL, TierPolicy, tighten
from ..kv.pool import PagePool
from ..tiers import PAGE
from .run import EngineParts
from .types import GenerationRequest


@dataclass(frozen=True)
class Grant:
    """The memory that a running request is allowed to hold.

    prompt: a key; requests with equal keys share the KV pages of their prompt; None: the memory of the
        request is not counted
    shape: the tier policy, the sizes of the KV pages and the model's sliding window, which decide the bytes
        of the request's caches
    growth: the lengths (tokens) to which the request's sequences can grow
    level: the number of steps by which the precision of the KV cache is lowered so that the request fits
    """

    prompt: Hashable = None
    shape: CacheShape | None = None
    growth: Growth | None = None
    level: int = 0


class Admission:
    """Admission computes the bytes that the KV caches of requests will need. If the backend has no KV pages
    or no memory budget, no request waits for memory."""

    def __init__(self, engine: EngineParts):
        self._engine = engine

    def check(self, request: GenerationRequest) -> None:
        """Raise CacheTooLarge if not even one reply to the request can ever fit into the memory budget."""
        if self._is_limited:
            self._growth(request, len(self._engine.prompt_ids(request)), 1, self._policy(request))

    def most_replies(self, request: GenerationRequest, count: int) -> int:
        """Return the largest number of replies to the request, from 1 to `count`, that fit into the full
        memory budget at the same time. Each of the replies must have room for the number of tokens for which
        a single reply has room."""
        if count == 1 or not self._is_limited:
            return count
        policy, prompt = self._policy(request), len(self._engine.prompt_ids(request))

        def end(replies: int) -> int:
            try:
                return self._growth(request, prompt, replies, policy).end
            except CacheTooLarge:
                return 0

        alone = end(1)
        return max(1, most(count, lambda replies: 0 < end(replies) == alone))

    def grant(
        self, request: GenerationRequest, replies: int, running: Sequence[Grant], mine: Collection[int] = ()
    ) -> Grant | None:
        """Return the memory that the request can hold if it starts now, or None if it must wait. Raises
        CacheTooLarge if the request can never fit, and MemoryBusy if it does not fit although no request
        runs.

        replies: the number of replies that continue from the request's prompt
        running: the grants of the running requests
        mine: the Python ids of the running requests' KV caches
        """
        if not self._is_limited or request.cancel.is_set():
            return Grant()
        policy, prompt = self._policy(request), self._engine.prompt_ids(request)
        name = (tuple(prompt), request.cache_salt, request.adapter_id, request.priority, policy)
        growth = self._growth(request, len(prompt), replies, policy)
        free = self._pool.budget - self.pinned_bytes(mine)
        # A lower precision would also change the pages of the running requests. While other requests run,
        # only level 0 (the precision that the tier policy asks for) is tried.
        levels = range(1 if running else MAX_LEVEL + 1)
        for grant in self._ways(name, growth, policy, levels):
            if self.total([*running, grant]) <= free:
                return self._apply_grant(grant, running, request)
        if not running and free < self._pool.budget:
            raise self.refusal(request, replies, running, mine)
        return None

    def refusal(
        self, request: GenerationRequest, replies: int, running: Sequence[Grant], mine: Collection[int] = ()
    ) -> MemoryBusy:
        """Return the MemoryBusy error that ends a request's wait for memory. The error names the bytes that
        the request needs and the free bytes."""
        policy, tokens = self._policy(request), len(self._engine.prompt_ids(request))
        growth, budget = self._growth(request, tokens, replies, policy), self._pool.budget
        need = self._shape(policy).peak(replace(growth, chunk=PAGE))
        return MemoryBusy(need, max(0, budget - self.pinned_bytes(mine) - self.total(running)), budget)

    def total(self, grants: Sequence[Grant]) -> int:
        """Return the maximum number of bytes that the requests with these grants hold together. Grants with
        the same `prompt` share the KV pages of the prompt."""
        families: dict[Hashable, list[Grant]] = {}
        for grant in grants:
            families.setdefault(grant.prompt, []).append(grant)
        return sum(map(_of_family, families.values()))

    def pinned_bytes(self, mine: Collection[int]) -> int:
        """Return the bytes of the KV caches that cannot be evicted, without the caches whose ids are in
        `mine`.

        mine: ids of caches
        """
        free = {*mine, *self._engine.sessions.evictable()}
        return held_bytes([cache for cache in self._pool.caches if id(cache) not in free])

    def longest(self) -> int:
        """Return the maximum number of tokens of one sequence whose KV cache at the lowest precision fits
        into the whole memory budget, however its tokens are divided into prompt and reply. The number is at
        most the model's context length; without a budget it is the context length."""
        context = self._engine.model.context
        if not self._is_limited:
            return context
        shape = self._shape(tighten(self._engine.sessions.policy or F16, MAX_LEVEL))

        def fits(n: int) -> bool:
            # A prompt that fills its last page can need less than a shorter prompt. So the first token of
            # the last page counts, too.
            lengths = n, n - (n - 1) % PAGE
            budget = self._pool.budget
            return all(shape.peak(Growth(tokens, tokens, 1, PAGE)) <= budget for tokens in lengths)

        return most(context, fits)

    # --------------------------------------------------------------------------------------------

    @property
    def _is_limited(self) -> bool:
        """Return True if the backend has KV pages and a memory budget for them."""
        pool = self._engine.backend.pool
        return pool is not None and pool.budget > 0

    @property
    def _pool(self) -> PagePool:
        pool = self._engine.backend.pool
        assert pool is not None  # `_is_limited`
        return pool

    def _policy(self, request: GenerationRequest) -> TierPolicy:
        return self._engine.sessions.policy_of(request.session_id) or F16

    def _growth(self, request: GenerationRequest, prompt: int, replies: int, policy: TierPolicy) -> Growth:
        """Return the numbers of tokens to which the request's sequences can grow. A reply without its own
        limit of tokens can grow until its KV cache fills the memory budget. Raises CacheTooLarge if the
        request's caches do not fit into the memory budget at the lowest precision."""
        backend, context = self._engine.backend, self._engine.model.context
        growth = Growth(prompt, min(prompt + request.max_new_tokens, context), replies, backend.chunk)
        least, budget = self._shape(tighten(policy, MAX_LEVEL)), self._pool.budget

        def fits(end: int) -> bool:
            return least.peak(replace(growth, end=end, chunk=PAGE)) <= budget

        if request.max_new_tokens >= context and fits(prompt + 1):
            return replace(growth, end=prompt + most(context - prompt, lambda n: fits(prompt + n)))
        if not fits(growth.end):
            need = least.peak(replace(growth, chunk=PAGE))
            raise CacheTooLarge(prompt, growth.end - prompt, need, budget, replies)
        return growth

    def _ways(
        self, name: Hashable, growth: Growth, policy: TierPolicy, levels: Iterable[int]
    ) -> Iterable[Grant]:
        """Yield the grants of memory to try, in order. Level by level, from the highest precision of the KV
        cache to the lowest, the first grant reads the prompt in the largest chunks; each next grant of the
        level halves the chunks, down to PAGE tokens."""
        chunks = [growth.chunk]
        while chunks[-1] > PAGE:
            chunks.append(max(PAGE, chunks[-1] // 2))
        for level in levels:
            shape = self._shape(tighten(policy, level))
            for chunk in chunks:
                yield Grant(name, shape, replace(growth, chunk=chunk), level)

    def _apply_grant(self, grant: Grant, running: Sequence[Grant], request: GenerationRequest) -> Grant:
        """Set the request's chunk size and reply limit from the grant. Set the lowest precision of the pool
        of KV pages to the highest level among this grant and the grants of the running requests."""
        growth = grant.growth
        assert growth is not None
        self._pool.least = max([grant.level, *(other.level for other in running)])
        request.prefill_chunk = growth.chunk
        request.max_new_tokens = min(request.max_new_tokens, growth.end - growth.prompt)
        return grant

    def _shape(self, policy: TierPolicy) -> CacheShape:
        window = getattr(self._engine.model.shape, "sliding_window", None) or 0
        return CacheShape(policy, self._pool.sizes, window)


def _of_family(grants: Sequence[Grant]) -> int:
    shape = grants[0].shape
    return 0 if shape is None else shape.together([g.growth for g in grants if g.growth is not None])


def most(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n from 1 to `limit` for which fits(n) is true, or 0 if there is none. `fits` must be
    false for all n after the first n for which it is false."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
