"""The learner: keeps the adapter, takes traces, applies ratings and takes them back.

Every change of weights is committed together with what caused it, and only then believed.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend
from ..errors import AdapterMismatch, NotFound, RuvmlxError
from ..kernels import micro as kernels
from ..lora import MicroLoRA
from ..lora.micro import RANK
from ..models.base import Model
from ..store import RatingRow, ReplyRow, Store
from . import instant, neutral, objective
from .ledger import Ledger
from .trace import Trace, adapted_logits

_TRACES_IN_MEMORY = 4


@dataclass(frozen=True)
class RatingResult:
    """What a rating did. Log-probabilities are means per token of the rated reply, nats."""

    reply_id: str
    rating: str
    applied: bool
    apply_us: float
    total_us: float
    logprob_before: float
    logprob_after: float
    kl: float
    kl_cap: float
    micro_norm: float
    adapter_version: int


class Learner:
    """The instant loop of one adapter on one model. Lives in the backend's thread."""

    def __init__(self, store: Store, model: Model, backend: Backend, name: str = "default"):
        self._store, self._model, self._backend = store, model, backend
        self.ledger = Ledger(store, model.fingerprint, name)
        self._neutral = self._load_neutral()
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self.version = -1
        self.micro: MicroLoRA
        self.kl = 0.0
        self.sync()

    # -- the adapter in use --------------------------------------------------------------------------

    def sync(self) -> None:
        """Take up the stored adapter, if another process (or this one) has moved on."""
        version = self.ledger.version()
        if version != self.version:
            self.micro, self.kl = self._load(version)
            self.version = version

    def _load(self, version: int) -> tuple[MicroLoRA, float]:
        config = self._model.config
        if version == 0:
            return MicroLoRA.fresh(self._neutral.directions, config.vocab_size), 0.0
        row = self.ledger.adapter(version)
        return MicroLoRA.from_bytes(row.state, config.hidden_size, config.vocab_size), row.kl

    def _load_neutral(self) -> neutral.Neutral:
        config, tokenizer = self._model.config, self._model.tokenizer
        stored = self._store.neutral(self._model.fingerprint)
        known = neutral.Neutral.from_bytes(stored, self._backend.head) if stored else None
        if known is None:
            known = neutral.measure(self._backend, tokenizer, RANK, config.vocab_size, config.max_context)
            self._store.put_neutral(self._model.fingerprint, known.to_bytes())
        return known

    # -- traces --------------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """A recorder for the next reply."""
        return Trace(self.micro, self.version)

    def keep(self, reply_id: str, trace: Trace) -> None:
        """Hold a reply's trace until it is settled."""
        if trace.tokens:
            self._traces[reply_id] = trace
            while len(self._traces) > _TRACES_IN_MEMORY:
                self._traces.popitem(last=False)

    def settle(self) -> None:
        """Make the newest reply ready to be rated, in this process or another."""
        for reply_id, trace in self._traces.items():
            if trace.variance is None:
                trace.settle(self._backend.head)
                self._store.put_trace(reply_id, trace.to_bytes())

    def _trace_of(self, reply: ReplyRow) -> Trace:
        """The reply's trace under the adapter in use: from memory, the store, or its tokens."""
        trace = self._traces.get(reply.id)
        if trace is None:
            stored = self._store.trace(reply.id)
            trace = Trace.from_bytes(stored, self.micro) if stored else None
        if trace is None:
            trace = self._replay(reply)
        elif trace.version != self.version:
            trace = trace.replayed(self.micro, self.version, self._backend.head)
        elif trace.variance is None:
            trace.settle(self._backend.head)
        return trace

    def _replay(self, reply: ReplyRow) -> Trace:
        """Read the reply again: one prefill over its prompt and its tokens."""
        if not reply.sampled_ids:
            raise NotFound(f"reply {reply.id} is empty: it was stopped before its first token.")
        states = self._backend.hidden_states(reply.prompt_ids + reply.sampled_ids[:-1])
        hidden = states[len(reply.prompt_ids) - 1 :]
        return Trace.from_hidden(self.micro, self.version, hidden, reply.sampled_ids, self._backend.head)

    # -- ratings -------------------------------------------------------------------------------------

    def rate(self, reply_id: str, rating: str, note: str = "") -> RatingResult:
        """Apply a rating and commit it. A reply rated before has its old rating taken back first."""
        started = time.perf_counter()
        rating = objective.check_rating(rating)
        self.sync()
        reply = self._rateable(reply_id)
        before, version_before = self.micro, self.version
        replaced = self.ledger.rating_of(reply.id)
        if replaced is not None:
            self._without(replaced)
        trace = self._trace_of(reply)
        weight = self._weight(reply, rating, trace, replaced)
        try:
            new, apply_us = self._apply(trace, weight)
        except kernels.NotFinite as e:
            self._restore()
            raise RuvmlxError(
                f"the rating was not applied: the update is not finite ({e}). The adapter is unchanged."
            ) from e
        changed = new is not None or replaced is not None
        row = RatingRow(
            0, reply.id, rating, note, weight, version_before, version_before, reply.query,
            replaced.id if replaced else None,
        )  # fmt: skip
        self._commit(reply, row, new, changed)
        total_us = 1e6 * (time.perf_counter() - started)
        logprob_before, logprob_after = self._logprobs(trace, before, self.micro)
        return RatingResult(
            reply.id, rating, changed, apply_us, total_us, logprob_before, logprob_after,
            self.kl, instant.KL_CAP, self.micro.norm, self.version,
        )  # fmt: skip

    def _rateable(self, reply_id: str) -> ReplyRow:
        reply = self._store.reply(reply_id)
        if reply.fingerprint != self._model.fingerprint:
            raise AdapterMismatch(
                f"reply {reply.id} came from {reply.model}; the loaded model is {self._model.name}. "
                f"Rate it with --model {reply.model}."
            )
        return reply

    def _without(self, row: RatingRow) -> None:
        """Set the weights in memory to what they were, or would be, without one rating."""
        if row.version_after == row.version_before:
            return
        if row.version_after == self.version:
            self.micro, self.kl = self._load(row.version_before)
            self.version = row.version_before
            return
        try:
            after, before = self._load(row.version_after)[0], self._load(row.version_before)[0]
        except NotFound:
            return  # too long ago: the new rating then simply adds to the old one
        taken = instant.capped(self.micro.moved(before, after), self._neutral)
        self.micro, self.kl = taken.adapter, taken.kl
        self.version = -1  # a state that was never stored: traces of any version are replayed

    def _weight(self, reply: ReplyRow, rating: str, trace: Trace, replaced: RatingRow | None) -> float:
        history = [r for r in self.ledger.ratings() if replaced is None or r.id != replaced.id]
        given = [r.rating for r in history]
        past = [(r.query, objective.reward(r.rating, given)) for r in history if r.query is not None]
        value = objective.baseline(reply.query, self._neutral.mean, past)
        w = objective.dro_weight(rating, objective.reward(rating, given), value, trace.log_ratio)
        return w * trace.importance if w < 0 else w

    def _apply(self, trace: Trace, weight: float) -> tuple[instant.Update | None, float]:
        """The update alone, timed in microseconds."""
        self._neutral.kl(self.micro)  # the first use computes the frozen probabilities
        started = time.perf_counter()
        update = instant.update(self.micro, trace, weight, self._neutral)
        return update, 1e6 * (time.perf_counter() - started)

    def _commit(self, reply: ReplyRow, row: RatingRow, update: instant.Update | None, changed: bool) -> None:
        """Commit the rating and the weights that it made; only then believe them."""
        adapter = update.adapter if update else self.micro
        kl = update.kl if update else self.kl
        try:
            state = adapter.to_bytes() if changed else None
            version = self.ledger.commit(reply, row, state, kl, adapter.norm)
        except BaseException:
            self._restore()
            raise
        self.micro, self.kl, self.version = adapter, kl, version

    def _restore(self) -> None:
        """Back to what the store holds."""
        self.version = -1
        self.sync()

    def _logprobs(self, trace: Trace, before: MicroLoRA, after: MicroLoRA) -> tuple[float, float]:
        """Mean log-probability per token of the traced reply under two adapters."""
        tokens = np.asarray(trace.tokens, np.int32)
        sums = [0.0, 0.0]
        at = 0
        for hidden, frozen in adapted_logits(None, trace.hidden, self._backend.head):
            for i, adapter in enumerate((before, after)):
                logits = frozen.copy()
                adapter.add_to_logits(logits, hidden)
                sums[i] += float(kernels.logprobs(logits, tokens[at : at + len(hidden)]).sum())
            at += len(hidden)
        return sums[0] / len(tokens), sums[1] / len(tokens)
