"""The learner: keeps the adapter, takes traces, applies ratings and takes them back.

Every change of weights is committed together with what caused it, and only then believed.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..backends.base import Backend, under
from ..errors import AdapterMismatch, NotFound, RuvmlxError, StoreBusy
from ..kernels import micro as kernels
from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.layer_lora import BodyLoRA, packed, unpacked_body
from ..lora.micro_lora import RANK
from ..lora.targets import Targets
from ..models.model import Model
from ..progress import QUIET, Watch
from ..store import HeadMoved, ReplyRow, Store
from . import instant, objective
from .adapter_history import Ledger
from .calibration import measure
from .kl_probe import Neutral
from .optional.kl_guard import restrain
from .optional.layer_adapter import Below
from .optional.layer_gradients import Pause
from .rating_index import Memory
from .state import Ground, RatingResult, State
from .trace import Trace, adapted_logits

_TRACES_IN_MEMORY = 4
_ATTEMPTS = 5  # when another process rates at the same time
_NEVER_STORED = -1
_BASES_IN_MEMORY = 3


class Learner:
    """The instant loop of one adapter on one model. Lives in the backend's thread."""

    def __init__(
        self, store: Store, model: Model, backend: Backend, name: str = "default",
        learn: bool = True, implicit: bool = False, targets: str = "head", watch: Watch = QUIET,
    ):  # fmt: skip
        """learn: False records ratings, and the bank follows them, but weights stay as they are.
        implicit: the bank also heeds what the user did with replies that were not rated.
        targets: the matrices that ratings change (lora/targets.py). watch: told of what is measured once for
        each model, and takes seconds."""
        self._store, self._model, self._backend = store, model, backend
        self._learns = learn
        self._below = Below(store, model, backend, targets)
        self.ledger = Ledger(store, model.fingerprint, name)
        self.memory = Memory(store, model, backend, self.ledger, implicit)
        backend.set_lora(None)
        self._frozen = self._load_neutral(watch)
        self._grounds: OrderedDict[int, Ground] = OrderedDict()
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._settled: set[str] = set()  # of those, the ones that the store has
        self._state = self._load(self.ledger.version())
        self._ground = self._ground_of(self._state.base)

    # -- the adapter in use --------------------------------------------------------------------------

    @property
    def micro(self) -> MicroLoRA:
        return self._state.micro

    @property
    def version(self) -> int:
        return self._state.version

    def sync(self) -> None:
        """Take up the stored adapter, if another process (or an undo) has moved on."""
        self._catch_up()
        self.stand()

    def _catch_up(self) -> None:
        version = self.ledger.version()
        if version != self._state.version:
            self._take(self._load(version))

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def state(self) -> State:
        return self._state

    @property
    def base(self) -> BaseLoRA | None:
        return self._ground.lora

    @property
    def nbytes(self) -> int:
        """Memory that it holds in weights and in what it knows of the neutral text."""
        known = sum(g.neutral.nbytes + (g.lora.nbytes if g.lora else 0) for g in self._grounds.values())
        own = self.micro.nbytes + (self.body.nbytes if self.body else 0)
        return own + self._frozen.nbytes + known + self._below.nbytes

    @property
    def targets(self) -> Targets:
        """What ratings change."""
        return self._below.targets

    @property
    def body(self) -> BodyLoRA | None:
        return self._state.body

    @property
    def standing(self) -> Ground:
        """What the adapter stands on, no body beside it."""
        return self._ground

    @property
    def neutral(self) -> Neutral:
        """The neutral text under the base in use, and a body as it was when it was read last."""
        return self._below.seen.neutral if self._below.seen else self._ground.neutral

    @property
    def frozen(self) -> Neutral:
        """The neutral text in the untouched model. Its contexts' probabilities are known, its head is not
        the untouched one's any more when there is a base."""
        return self._frozen

    def _take(self, state: State) -> None:
        """Use these weights from now on."""
        if state.base != self._state.base:
            self._ground, self._below.seen = self._ground_of(state.base), None
        elif not (state.body and state.body.moves):
            self._below.seen = None
        self._state = state

    def _ground_of(self, base: int) -> Ground:
        """Put a base into the backend and read the neutral text under it, unless that is known."""
        if base == 0:
            self._backend.set_lora(None)
            return Ground(None, self._frozen)
        ground = self._grounds.pop(base, None)
        if ground is None:
            ground = self.ground(self.ledger.base(base))
        elif self._backend.lora is not ground.lora:
            self._backend.set_lora(ground.lora)
        self._grounds[base] = ground
        while len(self._grounds) > _BASES_IN_MEMORY:
            self._grounds.popitem(last=False)
        return ground

    def ground(self, lora: BaseLoRA, pause: Callable[[], None] | None = None) -> Ground:
        """Put a base into the backend and read the neutral text under it. Whoever tries a base out calls
        `stand` when done, or when `pause`, which is called every few tokens, has raised."""
        if not {"probabilities", "packed"} <= vars(self._frozen).keys():
            self._backend.set_lora(None)
            self._frozen.look(pause or (lambda: None))  # while the untouched head is in place
        self._backend.set_lora(lora)
        context = self._model.config.max_context
        return Ground(lora, self._frozen.under(self._backend, self._model.tokenizer, context, pause))

    def stood(self, base: int, ground: Ground) -> None:
        """The neutral text as it is read under a base was found while that was tried out."""
        self._grounds[base] = ground

    def untouched(self) -> None:
        """Put the model without any base into the backend; `stand` ends it."""
        self._backend.set_lora(None)

    def stand(self) -> None:
        """The backend has the base in use, and the body in use beside it. A body that ratings have changed is
        put there here, between two replies: caches that were filled under the one before are stale then."""
        lora = self._below.change(self._ground.lora, self._state.body)
        if self._backend.lora is not lora:
            self._backend.set_lora(lora)

    def _stay(self) -> None:
        """The backend has the base in use; a body of the reply that is being written may stay beside it."""
        if not self._below.on(self._ground.lora, self._backend.lora):
            self.stand()

    def _load(self, version: int) -> State:
        config = self._model.config
        if version == 0:
            return State(MicroLoRA.fresh(self._frozen.directions, config.vocab_size), 0, 0, 0.0)
        row = self.ledger.adapter(version)
        micro = MicroLoRA.from_bytes(row.state, config.hidden_size, config.vocab_size)
        return State(micro, row.base, version, row.kl, unpacked_body(row.state, config))

    def _load_neutral(self, watch: Watch) -> Neutral:
        config, tokenizer = self._model.config, self._model.tokenizer
        stored = self._store.model_data.reference_text(self._model.fingerprint)
        eos = np.array(sorted(tokenizer.eos_ids))
        known = Neutral.from_bytes(stored, self._backend.head, eos) if stored else None
        if known is None:
            shape = (RANK, config.vocab_size, config.max_context)
            known = measure(self._backend, tokenizer, *shape, watch)
            self._store.model_data.put_reference_text(self._model.fingerprint, known.to_bytes())
        return known

    # -- traces --------------------------------------------------------------------------------------

    @property
    def learned(self) -> bool:
        """Are the weights in use others than the untouched model's?"""
        return self.base is not None or self.micro.norm > 0 or bool(self.body and self.body.moves)

    def trace(self, untouched: bool = False) -> Trace:
        """A recorder for the next reply; untouched: that is made with the model as it was, version 0."""
        if untouched:
            return Trace(self._load(0).micro, 0)
        return Trace(self.micro, self.version)

    def keep(self, reply_id: str, trace: Trace) -> None:
        """Hold a reply's trace until it is settled."""
        if trace.tokens:
            self._traces[reply_id] = trace
            while len(self._traces) > _TRACES_IN_MEMORY:
                self._settled.discard(self._traces.popitem(last=False)[0])

    def settle(self, pause: Pause | None = None) -> None:
        """Make the newest replies ready to be rated, in this process or another. pause: called between slices
        of what takes seconds, where ratings change more than the head; it may raise to leave."""
        for reply_id in self._traces:
            self._settle(reply_id)
        self.memory.settle()
        if self._learns and self._below.wanted(self._state):
            restrain(self, self._below, pause)
            self._below.prepare(self._state)
            for reply_id, trace in reversed(self._traces.items()):
                if self.ledger.base_of(trace.version) == self._state.base:
                    self._read(self._store.replies.get(reply_id), trace, self._state, pause)

    def _settle(self, reply_id: str) -> None:
        trace = self._traces[reply_id]
        if trace.said is None and trace.version == self._state.version:
            self.neutral.prepare()
            trace.said = instant.saying(trace, self.neutral)
        if reply_id not in self._settled and self.ledger.base_of(trace.version) == self._state.base:
            self._store.traces.put(reply_id, trace.to_bytes())
            self._settled.add(reply_id)

    def _trace_of(self, reply: ReplyRow, state: State) -> Trace:
        """The reply's trace under the given weights: from memory, the store, or its tokens."""
        if reply.id in self._traces:
            self._settle(reply.id)
        trace = self._traces.get(reply.id) or self._stored_trace(reply, state)
        if trace is None or self.ledger.base_of(max(0, trace.version)) != state.base:
            trace = self._replay(reply, state)  # its hidden states are those of another base
        self._read(reply, trace, state)
        if trace.version != state.version:
            trace = trace.replayed(state.micro, state.version, self._backend.head)
            trace.moved = self._below.beyond(trace, state)
        return trace

    def _read(self, reply: ReplyRow, trace: Trace, state: State, pause: Pause | None = None) -> None:
        """The trace has what a rating needs of the layers below the head, and keeps it."""
        if not (self._learns and self._below.wanted(state)):
            return
        drawn = self._body_of(trace.version, state)
        taken = self._below.read(self._ground.lora, state, drawn, reply, trace, pause)
        if taken and reply.id in self._settled and self._traces.get(reply.id) is trace:
            self._store.traces.put(reply.id, trace.to_bytes())

    def _body_of(self, version: int, state: State) -> BodyLoRA | None:
        try:
            return state.body if version == state.version else self._load(version).body
        except NotFound:  # too long ago to be known
            return state.body

    def _stored_trace(self, reply: ReplyRow, state: State) -> Trace | None:
        """Traces of other adapters are of no use; the untouched model is the same for all."""
        data = self._store.traces.get(reply.id)
        if data is None or not (reply.adapter == self.ledger.name or reply.adapter_version == 0):
            return None
        return Trace.from_bytes(data, state.micro)

    def _replay(self, reply: ReplyRow, state: State) -> Trace:
        """Read the reply again: one prefill over its prompt and its tokens."""
        if not reply.sampled_ids:
            raise NotFound(f"reply {reply.id} has no words: it was stopped at once, or its chat was deleted.")
        with under(self._backend, self._below.tried(self._ground.lora, state.body)):
            states = self._backend.hidden_states(reply.prompt_ids + reply.sampled_ids[:-1])
        hidden = states[len(reply.prompt_ids) - 1 :]
        return Trace.from_hidden(
            state.micro, state.version, hidden, reply.sampled_ids, self._backend.head, reply.logprob
        )

    # -- ratings -------------------------------------------------------------------------------------

    def rate(self, reply_id: str, rating: str, note: str = "") -> RatingResult:
        """Apply a rating and commit it. A reply rated before has its old rating taken back first."""
        started = time.perf_counter()
        rating = objective.check_rating(rating)
        reply = self._rateable(reply_id)
        for _ in range(_ATTEMPTS):
            try:
                return self._rate(reply, rating, note, started)
            except HeadMoved:
                continue
        raise StoreBusy("another process keeps rating replies of this adapter; try again.")

    def _rate(self, reply: ReplyRow, rating: str, note: str, started: float) -> RatingResult:
        self._catch_up()
        self._stay()
        before = self._state
        base = self._without(reply.id) if self._learns else before
        trace = self._trace_of(reply, base)
        weight = self._weight(reply, rating, trace)
        try:
            new, apply_us = self._apply(base, trace, weight)
        except kernels.NotFinite as e:
            raise RuvmlxError(
                f"the rating was not applied: the update is not finite ({e}). The adapter is unchanged."
            ) from e
        version = self.ledger.commit(
            before.version, reply.id, rating, note, weight,
            packed(new.micro, new.body), new.kl, new.micro.norm,
        )  # fmt: skip
        self._state = replace(new, base=before.base, version=version)
        self.memory.rated(reply, rating, version)
        total_us = 1e6 * (time.perf_counter() - started)
        logprobs = self._logprobs(trace, before, new)
        applied = new.micro is not before.micro or new.body is not before.body
        return RatingResult(
            reply.id, rating, applied, apply_us, total_us, *logprobs,
            new.kl, instant.KL_CAP, new.micro.norm, version,
        )  # fmt: skip

    def _rateable(self, reply_id: str) -> ReplyRow:
        reply = self._store.replies.get(reply_id)
        if reply.fingerprint != self._model.fingerprint:
            raise AdapterMismatch(
                f"{reply.model} wrote that reply, and only that model can learn from its rating; in use is "
                f"{self._model.name}. Change it by /model {reply.model} in a chat, else by --model."
            )
        return reply

    def _without(self, reply_id: str) -> State:
        """The weights in use less every push that earlier ratings of this reply gave them.

        What a consolidation has read since is part of the base, and stays.
        """
        state = self._state
        steps = self.ledger.steps_of_reply(state.version, reply_id)
        while steps and steps[-1][1] == state.version:  # the newest ones: what was before is stored
            state = self._load(steps.pop()[0])  # within the ancestors that are always kept
        for version_before, version_after in steps:
            try:
                origin, pushed = self._load(version_before), self._load(version_after)
            except NotFound:
                continue  # too long ago to be known: that push stays
            if origin.base != state.base:
                continue
            taken = instant.without(state.micro, origin.micro, pushed.micro, self.neutral)
            body = self._below.without(state, origin, pushed, self._ground.neutral)
            state = State(taken.adapter, state.base, _NEVER_STORED, taken.kl, body)
        return state

    def _weight(self, reply: ReplyRow, rating: str, trace: Trace) -> float:
        r, value = self.memory.weigh(reply, rating)
        w = objective.dro_weight(rating, r, value, trace.log_ratio) if self._learns else 0.0
        return w * trace.importance if w < 0 else w

    def _apply(self, base: State, trace: Trace, weight: float) -> tuple[State, float]:
        """The update alone, timed in microseconds; the same weights when there is nothing to push."""
        self.neutral.prepare()
        said = trace.said or instant.saying(trace, self.neutral)
        started = time.perf_counter()
        body = self._below.moved(base, trace, weight, self._ground.neutral)
        more = self._below.further(body)
        if self.targets.head:
            update = instant.update(base.micro, trace, weight, self.neutral, base.kl, said, max(0.0, more))
        else:
            update = instant.noted(base.micro, trace, weight, self.neutral.floor)
        apply_us = 1e6 * (time.perf_counter() - started)
        if update is None:
            return base, apply_us
        return State(update.adapter, base.base, _NEVER_STORED, max(0.0, update.kl + more), body), apply_us

    def _logprobs(self, trace: Trace, old: State, new: State) -> tuple[float, float]:
        """Mean log-probability per token of the traced reply under two states; what a body does to it, by its
        gradient: to first order."""
        tokens = np.asarray(trace.tokens, np.int32)
        sums = [0.0, 0.0]
        at = 0
        for hidden, frozen in adapted_logits(None, trace.hidden, self._backend.head):
            for i, adapter in enumerate((old.micro, new.micro)):
                logits = frozen.copy()
                adapter.add_to_logits(logits, hidden)
                sums[i] += float(kernels.logprobs(logits, tokens[at : at + len(hidden)]).sum())
            at += len(hidden)
        before, after = (self._below.beyond(trace, state) for state in (old, new))
        return sums[0] / len(tokens) + before, sums[1] / len(tokens) + after

    def release(self) -> None:
        """Give the memory of the training graph back; it is built again when wanted."""
        self._below.reader.close()
