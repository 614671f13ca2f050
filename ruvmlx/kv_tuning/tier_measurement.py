"""This module measures tier policies of the KV cache on the long replies in the user's store, and chooses the
policy of new caches. A tier is a precision in which KV pages are stored. A policy says at which age a page
moves to the next tier.

The module reports the state (tokens, bytes, time per token) of the KV cache at the end of each reply. The
module measures how much the logits differ between a candidate policy and an f16 cache, and applies the rule
of tier_choice.py.

In a measurement, the original model, without an adapter, reads a reply's prompt and tokens again, so ratings
do not influence the result. The work can be stopped between pieces of a few tens of milliseconds. The result
of one reply with one policy is stored when it is complete; if the measurement is stopped before, the next
review measures this reply and policy again from the beginning.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from ..backends.base import Backend, KVCache, original_model
from ..backends.select import default_policy
from ..engine.perplexity import kl_divergence
from ..engine.types import GenerationResponse
from ..kv.policy import F16, TierPolicy, limit_to
from ..kv.pool import HIGH, LOW, PagePool
from ..models.config.model import Model, OtherShape
from ..pausing import Pause, Stopped, stop_when
from ..sampling import log_softmax
from ..store import KVChoiceRow, KVMeasured, KVObservation, Store
from ..tiers import COLD, HOT, PAGE, lengths_by_name
from . import tier_choice
from .tier_choice import KL_LIMIT, REPLIES, CandidateSummary, KVChoice, KVStatus, choose, summary

BLOCKS = 8  # the maximum number of blocks of PAGE tokens, near the end of a reply, on which KL is measured
# the number of tokens that the model reads between two calls of `pause`: 25 to 40 ms with the starter model
# on two cores
PIECE = 16
TIMED = 16  # the number of tokens, after the compared blocks, that are decoded one by one to measure times
MAX_MEASURED_TOKENS = 4096  # the maximum number of tokens that the model reads of a prompt and its reply
REPLIES_AT_ONCE = 2  # the maximum number of replies that one review measures
NO_TIERS = "this backend has only f16 caches"
BIASED = "a model that adds a bias to its keys, which 4 bits would spoil"
RECENT_REPLIES = 100  # the number of newest replies from which `context` and the averages are computed


class NoRoom(Exception):
    """This error stops a measurement when memory is short, because the page pool would then replace the
    measured policy by a policy that needs less memory."""


def long_enough(candidates: tuple[TierPolicy, ...]) -> int:
    """Return the minimum number of tokens of a prompt and its reply for a measurement of all candidates. The
    minimum is the largest `reach` of the candidates plus two blocks plus TIMED tokens."""
    return max(policy.reach for policy in candidates) + 2 * PAGE + TIMED


@dataclass(frozen=True)
class Cost:
    """The measured cost of a policy on one reply.

    kl: for each compared block of PAGE tokens, the mean KL(f16 || policy) (nats per token)
    us, us_f16: microseconds per decoded token, with the policy and with f16
    """

    kl: list[float]
    us: float
    us_f16: float


class TierComparison:
    """A comparison of policies with f16 on at most BLOCKS blocks of PAGE tokens near the end of one reply.
    The model reads the compared tokens in turns with the f16 cache and with the policy's cache.

    All policies are compared on the same tokens. Each compared token attends to pages of each tier that the
    policy uses.
    """

    def __init__(self, backend: Backend, tokens: list[int], first: int):
        """tokens: the tokens of a prompt and its reply, at least first + PAGE + TIMED tokens. first: the
        token offset before which no block is compared."""
        self._backend, self.tokens = backend, tokens
        self._end = (len(tokens) - TIMED) // PAGE * PAGE
        self._start = max(first, self._end - BLOCKS * PAGE)
        self._f16: KVCache | None = None

    def new_bytes(self, policy: TierPolicy, page_bytes: tuple[int, ...]) -> int:
        """Return the maximum number of bytes that `cost` adds to the bytes of the page pool. The f16 cache of
        an earlier call is in the pool already. page_bytes: bytes of one page, by tier."""
        whole = len(self.tokens) + PAGE
        held = F16.bytes(self._start // PAGE * PAGE, page_bytes) if self._f16 is not None else 0
        return F16.bytes(whole, page_bytes) - held + policy.bytes(whole, page_bytes)

    def cost(self, policy: TierPolicy, pause: Pause) -> Cost:
        """Measure KL(f16 || policy) between the distributions over the whole vocabulary, and the time of a
        decoded token with an f16 cache and with the policy's cache."""
        if self._f16 is None:
            self._f16 = self._read(F16, pause)
        caches = [self._f16.fork(), self._read(policy, pause)]
        kl = [self._block(at, caches, pause) for at in range(self._start, self._end, PAGE)]
        rest = self.tokens[self._end : self._end + TIMED]
        us_f16, us = _token_times(self._backend, rest, caches, pause)
        return Cost(kl, us, us_f16)

    def _read(self, policy: TierPolicy, pause: Pause) -> KVCache:
        """Return a cache with this policy that holds all tokens before the compared blocks."""
        cache = self._backend.new_cache(policy)
        # A piece has 2 * PIECE tokens here, because `prefill` computes no logits and so takes less time per
        # token.
        for at in range(0, self._start, 2 * PIECE):
            pause()
            self._backend.prefill(self.tokens[at : at + 2 * PIECE], cache)
        return cache

    def _block(self, start: int, caches: list[KVCache], pause: Pause) -> float:
        pieces = (self.tokens[at : at + PIECE] for at in range(start, start + PAGE, PIECE))
        return sum(_kl_of_piece(self._backend, piece, caches, pause) for piece in pieces) / PAGE


def _kl_of_piece(backend: Backend, piece: list[int], caches: list[KVCache], pause: Pause) -> float:
    """Return the sum of KL(f16 || policy), in nats, over the tokens of a piece. caches: [the f16 cache, the
    cache with the policy]."""
    logits = []
    for cache in caches:
        pause()
        logits.append(backend.verify(piece, cache))
    pause()
    rows = zip(*logits, strict=True)
    return sum(kl_divergence(log_softmax(p), log_softmax(q)) for p, q in rows)


def _token_times(backend: Backend, tokens: list[int], caches: list[KVCache], pause: Pause) -> list[float]:
    """Decode each token once with each cache. Return, for each cache, the median time per token in
    microseconds."""
    times: list[list[float]] = [[] for _ in caches]
    for token in tokens:
        pause()
        for cache, taken in zip(caches, times, strict=True):
            started = time.perf_counter()
            backend.decode(token, cache)
            taken.append(1e6 * (time.perf_counter() - started))
    return [median(taken) for taken in times]


class TierHistory:
    """A reader of the stored measurements and choices of KV policies, for one model on one backend. The
    reader needs the store but not the model's weights."""

    def __init__(
        self,
        store: Store,
        model: Model,
        backend: str,
        asked: TierPolicy | None = None,
        has_pages: bool = True,
    ):
        """asked: the policy that the user chose, which overrides the measurements; None if the user chose
        none. A backend with only f16 caches ignores the user's policy. has_pages: False if the open backend
        has no KV pages; without an open backend, the model and the backend's name can show this."""
        self.store, self.mine = store, (model.fingerprint, backend)
        no_pages = backend == "reference" or isinstance(model.shape, OtherShape)
        self._has_f16_only = no_pages or not has_pages
        self.asked = None if self._has_f16_only else asked
        self.default = default_policy(model.shape)
        self.candidates = tier_choice.candidates(self.default.lowest)

    @property
    def policy(self) -> TierPolicy:
        """Return the policy of new KV caches: the user's policy if the user chose one, else the measured
        choice, else the default."""
        if self.asked is not None:
            return self.asked
        if self._has_f16_only:
            return F16
        row = self.choice
        return replace(self.default, lengths=row.lengths) if row else self.default

    @property
    def choice(self) -> KVChoiceRow | None:
        """Return the policy that earlier measurements chose. Return None if the store has no choice. Return
        None also for a choice with 4 bits if this model must not have 4 bits."""
        row = self.store.kv.choice(*self.mine)
        if row is None:
            return None
        chosen = replace(self.default, lengths=row.lengths)
        return row if limit_to(chosen, self.default.lowest) == chosen else None

    def status(self) -> KVStatus:
        row, need = self.choice, long_enough(self.candidates)
        long = self.store.kv.long_replies(self.mine[0], need)
        report = row.report if row else None
        return KVStatus(
            self.mine[1], self.policy, self.asked is not None, self._reason(report),
            report, len(long), need, self._reply_averages(),
        )  # fmt: skip

    def _reason(self, report: dict[str, Any] | None) -> str:
        if self.asked is not None:
            return "you asked for it"
        if self._has_f16_only:
            return NO_TIERS
        if report is not None:
            return report["reason"]
        done = len({m.reply_id for m in self.store.kv.measurements(*self.mine)})
        which = "the default" if self.default.lowest == COLD else f"the default for {BIASED}"
        return f"{which}; {done} of the {REPLIES} long replies that a choice needs have been measured"

    def _reply_averages(self) -> list[dict[str, Any]]:
        """Return the median time per token and the maxima of tokens, bytes and memory pressure over the
        newest RECENT_REPLIES replies: one entry for each policy that their caches had."""
        by_policy: dict[tuple[int, ...], list[KVObservation]] = {}
        for seen in self.store.kv.observations(*self.mine, RECENT_REPLIES):
            by_policy.setdefault(seen.lengths, []).append(seen)
        return [_averages(lengths, seen) for lengths, seen in by_policy.items()]

    def unmeasured_candidates(self) -> Iterator[tuple[str, list[TierPolicy]]]:
        """Yield (reply id, candidates that were not measured on this reply) for each long reply, the newest
        first. A reply on which all candidates were measured is left out."""
        known = {(m.reply_id, m.lengths) for m in self.store.kv.measurements(*self.mine)}
        for reply_id in self.store.kv.long_replies(self.mine[0], long_enough(self.candidates)):
            missing = [c for c in self.candidates if (reply_id, c.lengths) not in known]
            if missing:
                yield reply_id, missing

    def context(self) -> int:
        """Return the number of tokens for which the memory of a policy is computed: the length of the longest
        recent prompt and reply, but at least `long_enough`."""
        seen = self.store.kv.observations(*self.mine, RECENT_REPLIES)
        return max([s.tokens for s in seen] + [long_enough(self.candidates)])

    def is_enough(self) -> bool:
        """Return True if each candidate was measured on at least REPLIES replies, so that a choice is
        possible."""
        seen = Counter(m.lengths for m in self.store.kv.measurements(*self.mine))
        return all(seen[candidate.lengths] >= REPLIES for candidate in self.candidates)

    def summaries(self, nbytes: Callable[[TierPolicy], int]) -> list[CandidateSummary]:
        """Return a summary of the measurements of each candidate. The list is empty while `is_enough` returns
        False.
        nbytes: a function that returns the bytes of a cache with a policy."""
        if not self.is_enough():
            return []
        rows = self.store.kv.measurements(*self.mine)
        mine = [(c, [m for m in rows if m.lengths == c.lengths]) for c in self.candidates]
        return [summary(c, seen, nbytes(c)) for c, seen in mine]


def _averages(lengths: tuple[int, ...], seen: list[KVObservation]) -> dict[str, Any]:
    timed = [s.us_per_token for s in seen if s.us_per_token > 0]
    return {
        **lengths_by_name(lengths),
        "replies": len(seen),
        "longest": max(s.tokens for s in seen),
        "bytes": max(sum(s.tier_bytes) for s in seen),
        "us_per_token": median(timed) if timed else None,
        "pressure": max(s.pressure for s in seen),
    }


class KVLoop:
    """A loop that reports the states of KV caches, measures policies, and chooses the policy of new caches.
    Use this object only in the backend's thread."""

    def __init__(
        self, history: TierHistory, model: Model, backend: Backend, limit: float | None = None
    ) -> None:
        """limit: the maximum of mean KL(f16 || policy) plus two standard errors of an allowed policy (nats
        per token); None for KL_LIMIT."""
        self.history, self._backend = history, backend
        self._context = model.shape.max_context
        self._limit = KL_LIMIT if limit is None else limit
        self._pool = backend.pool

    # -- observing -----------------------------------------------------------------------------------

    def observation(self, response: GenerationResponse, policy: TierPolicy | None) -> KVObservation:
        """Return the state of a reply's KV cache at the end of the reply. policy: the cache's policy; None
        for f16."""
        kv, tps = response.kv, response.generation_tps
        lower = [self._size(n, tier) for tier, n in enumerate(kv.tokens[:HOT])]
        return KVObservation(
            response.request_id,
            *self.history.mine,
            policy.lengths if policy else F16.lengths,
            response.cache_tokens,
            (*lower, kv.bytes - sum(lower)),
            1e6 / tps if tps > 0 else 0.0,
            self._pool.pressure() if self._pool else 0.0,
            self._pool.level if self._pool else 0,
            response.ttft_ms,
            response.generation_tokens,
        )

    def _size(self, tokens: int, tier: int) -> int:
        """Return the number of bytes of the full pages of `tokens` tokens, all in `tier`; 0 if the backend
        has no pages."""
        return tokens // PAGE * self._pool.sizes[tier] if self._pool else 0

    # -- reviewing -----------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return True if there is a long reply on which a candidate was not measured yet."""
        return self._pool is not None and next(self.history.unmeasured_candidates(), None) is not None

    def review(self, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Measure the missing candidates on at most REPLIES_AT_ONCE replies, then choose the policy of new
        caches. Return a report. The event `cancel` stops the measurement, but not the choice."""
        if self._pool is None:
            return {"measured": 0, "changed": False, "stopped": "", "reason": NO_TIERS}
        started, stop = time.perf_counter(), ""
        done: list[str] = []
        try:
            with original_model(self._backend):
                self._measure_some(stop_when(cancel), done)
        except Stopped:
            stop = "stopped; the next review continues it"
        except NoRoom as e:
            stop = str(e)
        report = self._choose(self._pool) | {"measured": len(done), "stopped": stop}
        return report | {"seconds": time.perf_counter() - started}

    def _measure_some(self, pause: Pause, done: list[str]) -> None:
        for i, (reply_id, missing) in enumerate(list(self.history.unmeasured_candidates())):
            if i == REPLIES_AT_ONCE:
                return
            tokens = self.history.store.replies.tokens(reply_id)[: min(MAX_MEASURED_TOKENS, self._context)]
            reading = TierComparison(
                self._backend, tokens, max(policy.reach for policy in self.history.candidates)
            )
            for policy in missing:
                cost = self._measure(reading, policy, pause)
                row = KVMeasured(
                    reply_id, policy.lengths, len(cost.kl), sum(cost.kl),
                    float(np.square(cost.kl).sum()), cost.us, cost.us_f16,
                )  # fmt: skip
                self.history.store.kv.add_measured(*self.history.mine, row)
            done.append(reply_id)

    def _measure(self, reading: TierComparison, policy: TierPolicy, pause: Pause) -> Cost:
        """Measure one policy on one reply. Raises NoRoom if memory is or gets short, because the page pool
        would then replace the policy by a policy that needs less memory."""
        pool = self._pool
        assert pool is not None

        def check_memory() -> None:
            pause()
            if pool.level:
                raise NoRoom("memory is short; nothing is measured until there is room")

        need = reading.new_bytes(policy, pool.sizes)
        if pool.pressure() > LOW or (pool.budget and pool.nbytes + need > pool.budget):
            raise NoRoom("memory has no room for two more caches; nothing is measured")
        with pool.same_level():
            check_memory()
            return reading.cost(policy, check_memory)

    def _choose(self, pool: PagePool) -> dict[str, Any]:
        """Choose a policy from all stored measurements, and return a report. Store the choice if each
        candidate has enough measurements."""
        history, context, now = self.history, self.history.context(), pool.pressure()
        before = history.choice
        was_pressed = bool(before and before.report["pressed"])
        pressed = now > HIGH or (was_pressed and now >= LOW)
        found = history.summaries(lambda policy: policy.bytes(context, pool.sizes))
        asked = {"asked": history.asked is not None, "pressure": now, "changed": False}
        if before and not found:  # mostly: the list of candidates has new policies, not measured yet
            return before.report | asked
        choice = choose(
            found, budget=pool.budget, pressed=pressed, limit=self._limit, default=history.default
        )
        report = {
            **choice.policy.lengths_by_name(),
            "reason": choice.reason,
            "pressed": pressed,
            "context": context,
            "budget": pool.budget,
            "limit": self._limit,
            "candidates": [f.report for f in found],
        }
        changed = self._keep(before, choice, report) if found else False
        return report | asked | {"changed": changed}

    def _keep(self, before: KVChoiceRow | None, choice: KVChoice, report: dict[str, Any]) -> bool:
        """Store the choice if its report differs from the stored report. Return True if the chosen policy
        differs from the stored policy (from the default if none is stored)."""
        if before and before.report == report:
            return False
        lengths = choice.policy.lengths
        self.history.store.kv.put_choice(*self.history.mine, KVChoiceRow(lengths, report, time.time()))
        return lengths != (before.lengths if before else self.history.default.lengths)
