"""This module finds the trace of a reply. A trace (trace.py) is the gradient of the reply's log-probability,
which a rating needs. The newest traces are in memory, and older traces are in the store. If the store does
not have the trace either, the model reads the reply again in a prefill."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from ..backends.base import original_model, with_lora
from ..errors import NotFound, StoreError
from ..lora.layer_lora import LayerLoRA
from ..pausing import Pause
from ..store import ReplyRow, Store
from . import instant
from .active_adapter import ActiveAdapter, is_blank
from .layer_part import LayerKLGuard, LayerPart
from .reply_logits import MAX_TOKENS, ReplyLogits
from .state import LearnerState
from .trace import Trace

_TRACES_IN_MEMORY = 4
_READ_AHEAD_BYTES = 128 << 20  # the maximum size of the traces that `read_ahead` keeps


class ReplyTraces:
    """The traces of one learner's replies. Only the backend's thread can use this object."""

    def __init__(
        self, store: Store, active: ActiveAdapter, layers: LayerPart, guard: LayerKLGuard, learns: bool
    ):
        self._store, self._active, self._layers, self._guard = store, active, layers, guard
        self._learns = learns
        self.held: OrderedDict[str, Trace] = OrderedDict()  # traces by reply id, the newest last
        self._stored: set[str] = set()  # the ids of replies in `held` whose traces are in the store, too
        self._ahead: dict[str, Trace] = {}  # the traces of `read_ahead`, by reply id

    @property
    def nbytes(self) -> int:
        """The number of bytes of the traces in memory."""
        return sum(trace.nbytes for trace in self.held.values())

    def keep(self, reply_id: str, trace: Trace) -> None:
        """Keep a reply's trace in memory. If memory holds more than _TRACES_IN_MEMORY traces, store the
        oldest trace, and drop it from memory. A blank adapter is an adapter that was made before the model's
        KL probe was known. A blank adapter's trace under a base LoRA is not kept, because the hidden states
        do not come from the original model."""
        if trace.tokens and not (is_blank(trace.adapter) and self._active.base is not None):
            self.held[reply_id] = trace
            while len(self.held) > _TRACES_IN_MEMORY:
                oldest = next(iter(self.held))
                with suppress(StoreError):  # without its trace, the reply can still be rated
                    self._store_trace(oldest)
                del self.held[oldest]
                self._stored.discard(oldest)

    def forget_deleted(self) -> None:
        """Drop the traces of replies whose words were deleted."""
        for reply_id in [held for held in self.held if not self._store.replies.tokens(held)]:
            del self.held[reply_id]
            self._stored.discard(reply_id)

    def save(self) -> None:
        """Store the traces in memory, because this process will no longer have them. If the store cannot be
        written, they are lost: without its trace, a reply can still be rated."""
        with suppress(StoreError):
            for reply_id in self.held:
                self._store_trace(reply_id)

    def settle(self, pause: Pause | None = None) -> None:
        """Store the traces of the newest replies, so that another process need not compute them again. If
        the model is measured, then compute the statistics that a rating of these replies needs. pause: a
        function that can raise an exception to stop this computation."""
        for reply_id in self.held:
            self._complete(reply_id)
        for reply_id in self.held:
            if pause is not None:
                pause()
            self._add_stats(reply_id, pause)

    def settle_by_model(self, pause: Pause | None = None) -> None:
        """Compute the `ReplyLogits` and the layer gradients of the newest replies. The model reads no text
        for the logits, but runs its output head. A later rating of these replies is then faster.

        pause: a function that can raise an exception to stop the work; None: compute no logits, because the
            user waits until this method returns
        """
        if pause is not None:
            for trace in reversed(self.held.values()):
                self._settle_logits(trace, pause)
        self._settle_layers(pause)

    def _settle_logits(self, trace: Trace, pause: Pause) -> None:
        active, base, reply = self._active, self._active.state.base, np.array(trace.tokens)
        if trace.logits or len(reply) > MAX_TOKENS or active.history.base_of(trace.version) != base:
            return
        # The backend can have the LoRA of another adapter, whose reply is not complete. This method must not
        # replace that LoRA.
        if active.backend.lora is not active.combined_lora:
            return
        trace.logits = ReplyLogits.of(
            trace.hidden_states, reply, active.probe.coordinates, active.backend.head, base, pause
        )

    def _settle_layers(self, pause: Pause | None) -> None:
        """Scale the layer LoRA down if its KL exceeds its limit, then compute the layer gradients of the
        newest replies. The layer gradient is the gradient by the weights of the layer LoRA. The work takes
        seconds."""
        if not (self._learns and self._layers.needs_gradient(self._active.state)):
            return
        self._guard(self._active, pause)
        state = self._active.state
        self._layers.prepare(state)
        for reply_id, trace in reversed(list(self.held.items())):
            if not self._store.replies.tokens(reply_id):  # the reply was deleted
                del self.held[reply_id]
                self._stored.discard(reply_id)
            elif self._active.history.base_of(trace.version) == state.base:
                self._read_layers(self._store.replies.get(reply_id), trace, state, pause)

    def _complete(self, reply_id: str) -> None:
        if self._active.knows_model:
            self._trace_with_directions(reply_id)
            self._store_trace(reply_id)

    def _add_stats(self, reply_id: str, pause: Pause | None = None) -> None:
        trace, state = self.held[reply_id], self._active.state
        fits = trace.version == state.version and trace.adapter.rank == state.micro.rank
        if trace.stats is None and fits and self._active.is_measured:
            self._active.probe.prepare(pause)
            trace.stats = instant.prepare_stats(trace, self._active.probe)

    def _store_trace(self, reply_id: str) -> None:
        """Store a trace that is in memory, unless the store has it, a blank adapter recorded it, or the
        adapter's base LoRA has changed since."""
        trace, active = self.held[reply_id], self._active
        if reply_id in self._stored or is_blank(trace.adapter):
            return
        if active.history.base_of(trace.version) == active.state.base:
            self._store.traces.put(reply_id, trace.to_bytes())
            self._stored.add(reply_id)

    def _trace_with_directions(self, reply_id: str) -> Trace:
        """Return a reply's trace from memory. If a blank adapter recorded the trace, compute the trace again
        with the adapter's calibrated lora_a. The original model's output head reads the trace's hidden states
        again."""
        trace = self.held[reply_id]
        if is_blank(trace.adapter):
            with original_model(self._active.backend):
                trace = trace.replay(self._active.load(0).micro, 0, self._active.backend.head)
            self.held[reply_id] = trace
        return trace

    def of(self, reply: ReplyRow, state: LearnerState) -> Trace:
        """Return the reply's trace under the weights of `state`."""
        if reply.id in self.held:
            self._complete(reply.id)
            self._add_stats(reply.id)
        trace = self.held.get(reply.id) or self._read(reply, state) or self._ahead.get(reply.id)
        if trace is None or self._active.history.base_of(max(0, trace.version)) != state.base:
            trace = self.replay(reply, state)  # the old trace's hidden states come from another base LoRA
        self._read_layers(reply, trace, state)
        if trace.version != state.version or trace.adapter.rank != state.micro.rank:
            trace = trace.replay(state.micro, state.version, self._active.backend.head)
            trace.moved = self._layers.logprob_shift(trace, state)
        return trace

    def _read_layers(
        self, reply: ReplyRow, trace: Trace, state: LearnerState, pause: Pause | None = None
    ) -> None:
        """Add the layer gradient to the trace, if ratings need it, and store the trace again."""
        if not (self._learns and self._layers.needs_gradient(state)):
            return
        drawn = self.layer_lora_of(trace.version, state)
        added = self._layers.read(self._active.base, state, drawn, reply, trace, pause)
        if added and reply.id in self._stored and self.held.get(reply.id) is trace:
            self._store.traces.put(reply.id, trace.to_bytes())

    def layer_lora_of(self, version: int, state: LearnerState) -> LayerLoRA | None:
        """Return the layer LoRA of an adapter version. If the store no longer has the version, return the
        layer LoRA of `state`."""
        try:
            return state.layer_lora if version == state.version else self._active.load(version).layer_lora
        except NotFound:
            return state.layer_lora

    def _read(self, reply: ReplyRow, state: LearnerState) -> Trace | None:
        """Return the stored trace of a reply. Return None if the store has no sound trace of the reply, or if
        another adapter wrote the reply. All adapters share the traces of version 0, which has no learned
        weights."""
        data = self._store.traces.get(reply.id)
        if data is None or not (reply.adapter == self._active.history.name or reply.adapter_version == 0):
            return None
        return Trace.from_bytes(data, state.micro)

    @contextmanager
    def read_ahead(self, reply_ids: Iterable[str], state: LearnerState) -> Iterator[None]:
        """Compute the traces of these replies before the `with` block, because the block locks the store and
        the model takes long to read a reply. The method skips replies with a trace in memory or in the store.
        The method stops when the traces take _READ_AHEAD_BYTES. If ratings also change layers below the
        output head, the method computes nothing, because each trace then depends on the rating before.

        state: the weights with which the block begins
        """
        left = 0 if self._layers.needs_gradient(state) else _READ_AHEAD_BYTES
        try:
            for reply in map(self._store.replies.get, reply_ids):
                if left > 0 and reply.id not in self.held and self._read(reply, state) is None:
                    with suppress(NotFound):  # the block says which words are missing
                        trace = self._ahead[reply.id] = self.replay(reply, state)
                        left -= trace.nbytes
            yield
        finally:
            self._ahead.clear()

    def replay(self, reply: ReplyRow, state: LearnerState) -> Trace:
        """Compute the trace of a reply again under `state`, with one prefill over the prompt and the reply.
        Raises NotFound if the reply has no tokens."""
        if not reply.rated_ids or not reply.prompt_ids:
            raise NotFound(f"reply {reply.id} is empty: it was stopped at once, or its words were deleted.")
        backend = self._active.backend
        with with_lora(backend, self._active.replay_lora(state)):
            states = backend.hidden_states(reply.context_ids + reply.rated_ids[:-1])
        hidden = states[len(reply.context_ids) - 1 :]
        return Trace.from_hidden(
            state.micro, state.version, hidden, reply.rated_ids, backend.head, reply.logprob
        )
