"""This module holds the adapter with which the model writes its replies. An adapter has a MicroLoRA (the LoRA
of the output head, which ratings update), often a base LoRA (which a slow loop makes), and sometimes a layer
LoRA. `ActiveAdapter` also holds KL probes: one of the model without an adapter, and one under each base LoRA
in memory. A KL probe (kl_probe.py) measures how far an adapter is from the model without any adapter.

If an undo, a rollback or another process's rating has changed the adapter version in use, `catch_up` loads
this version from the store. `install` gives the base and the layer LoRA to the backend, as one LoRA.

The constructor of ActiveAdapter measures no KL probe. But a rating needs the KL probe of the model without an
adapter (measured once, then stored; this package contains it for the starter model) and, if there is a base
LoRA, the KL probe under the base LoRA. `measure` measures the missing KL probes while the user reads the
first reply, or else at the first rating.
"""

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Event
from typing import Protocol

import numpy as np

from ..backends.base import KL, Backend, TwoSided, original_model, preserve_lora, worker
from ..errors import SideFailed
from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.layer_lora import LayerLoRA, unpack_layers
from ..lora.micro_lora import RANK
from ..models.config.model import Model
from ..pausing import Pause, stop_when
from ..progress import QUIET, Watch
from ..store import Store
from .adapter_history import AdapterHistory
from .base_probe import RankedProbe, complete_probe, kl_in_answers, probe_under
from .calibration import Measured, Measurement
from .kl_probe import KLProbe
from .shipped import shipped_bytes
from .state import LearnerState, ProbedBase
from .whole_text import WholeTextReader

LOOK_EVERY = 0.02  # seconds between two calls of `pause` while the other side measures
_BASES_IN_MEMORY = 2  # the base LoRA in use, and the one before, to which an undo returns


class LayerInstaller(Protocol):
    """The protocol of the part that combines a layer LoRA with the base LoRA and keeps the KL probe of the
    combination. optional/layer_adapter.py implements it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def probe(self) -> KLProbe | None:
        """The last measured KL probe under the base and the layer LoRA; None if no probe was measured."""

    def forget_probe(self) -> None:
        """Discard the KL probe, because the adapter no longer uses the base or the layer LoRA under which the
        probe was measured."""

    def combined_lora(self, base: BaseLoRA | None, layer_lora: LayerLoRA | None) -> BaseLoRA | None:
        """Return the base and the layer LoRA as one LoRA. The same arguments return the same object, because
        a KV cache is valid only for the LoRA object with which it was computed."""

    def combined_once(self, base: BaseLoRA | None, layer_lora: LayerLoRA | None) -> BaseLoRA | None:
        """Return the base and the layer LoRA as one LoRA for a single use. This combination does not replace
        the combination in use, which `combined_lora` keeps in its cache."""

    def has_base(self, lora: BaseLoRA | None, base: BaseLoRA | None) -> bool:
        """Return True if `lora` is the base LoRA, or the newest combination of the base and a layer LoRA."""


class ActiveAdapter:
    """The adapter in use. Only the backend's thread can use this object."""

    def __init__(
        self, store: Store, model: Model, backend: Backend, history: AdapterHistory, layers: LayerInstaller,
        bits: int = 32, rank: int = RANK,
    ):  # fmt: skip
        """bits: the bits of a weight of base LoRAs in memory, 32 or 4. A base LoRA that the store has with 4
        bits keeps them. rank: the rank of the MicroLoRA of an adapter that begins, 1 or 2; an adapter that
        has learned keeps its rank."""
        self._bits = bits
        self._store, self._model, self._layers = store, model, layers
        self.backend, self.history = backend, history
        self._measurement = self._new_measurement()
        # the part of the measurement that the backend's other side does while a reply is written
        self._ahead: Future[KLProbe] | None = None
        self._hurry = Event()  # ends `_ahead`, because a rating waits
        self._whole = WholeTextReader(store, model, backend)  # what a base LoRA is compared with
        self._frozen = RankedProbe(rank)
        self._frozen.keep(self._stored_probe())
        self._bases: OrderedDict[int, BaseLoRA] = OrderedDict()
        # {id of a base LoRA: this LoRA and its KL probe}. Only the probe of the base LoRA in use has its
        # probabilities, because these take many megabytes.
        self._probed: dict[int, ProbedBase] = {}
        self.state = self.load(history.version())
        self._frozen.change_rank(self.state.micro.rank)
        self.base = self._load_base(self.state.base)
        backend.set_lora(self.base)

    # -- the measurement of the model ------------------------------------------------------------------

    @property
    def knows_model(self) -> bool:
        """True if the KL probe of the model without any adapter is known. While this KL probe is unknown,
        adapter version 0 is blank: its lora_a is zero, also in the traces of its replies (trace.py)."""
        return self._frozen.probe is not None

    @property
    def is_measured(self) -> bool:
        """True if the KL probes that ratings need are known: the probe of the model without any adapter and,
        if there is a base LoRA, the probe under the base LoRA."""
        known = self._probed.get(self.state.base)
        return self.knows_model and (self.base is None or (known is not None and known.is_complete))

    def measure(self, pause: Pause | None = None, watch: Watch = QUIET, is_hurried: bool = False) -> None:
        """Measure the KL probes that are still unknown: the model's (measured once, then stored) and the
        probe under the base LoRA in use (stored only in memory). A measurement takes seconds.

        pause: a function that can raise an exception to stop the measurement; the next call continues
        watch: an object that gets the progress of the model's measurement
        is_hurried: True if a rating waits; the measurement of the model is then less exact if the machine is
            slow
        """
        if self._frozen.probe is None:
            self._frozen.keep(self._stored_probe())  # another process can have stored the probe
        if self._frozen.probe is None:
            with original_model(self.backend):
                probe = self._measure_model(pause, watch, is_hurried)
            self._store.model_data.put_reference_text(self._model.fingerprint, probe.to_bytes())
            self._frozen.keep(probe)
        if self.state.version == 0 and is_blank(self.state.micro):
            self.state = self.load(0)
        if self.base is not None and not self.is_measured:
            with preserve_lora(self.backend):
                if known := self._probed.get(self.state.base):
                    self._set(known.lora)
                    complete_probe(self.frozen_probe, known.probe, self.backend, pause)
                else:
                    self._probed[self.state.base] = self.probe_base(self.base, pause)

    def measure_ahead(self) -> None:
        """Begin the measurement of the model on the backend's other side, if it has one, while a reply is
        written. The next `measure` completes it."""
        if self._frozen.probe is None and self._ahead is None and isinstance(self.backend, TwoSided):
            self._hurry.clear()
            self._ahead = self.backend.start_beside(KL, self._measure_beside)

    def _measure_beside(self, backend: Backend, pause: Pause) -> KLProbe:
        hurry = stop_when(self._hurry)

        def pause_or_hurry() -> None:
            pause()
            hurry()

        return self._measurement.run(pause_or_hurry)

    def _measure_model(self, pause: Pause | None, watch: Watch, is_hurried: bool) -> KLProbe:
        """Complete the measurement of the model. If a side of the backend fails, begin again on the other."""
        if self._ahead is not None:
            if is_hurried:
                self._hurry.set()
            while not wait([self._ahead], LOOK_EVERY).done:
                if pause is not None:
                    pause()
            self._ahead = None
        try:
            return self._measurement.run(pause, watch, is_hurried)
        except SideFailed:
            self._measurement = self._new_measurement()
            return self._measurement.run(pause, watch, is_hurried)

    def _new_measurement(self) -> Measurement:
        return Measurement(Measured.of(self._model, worker(self.backend, KL), RANK))

    @property
    def frozen_probe(self) -> KLProbe:
        """The KL probe of the frozen model (the model without any adapter). If the probe is unknown, this
        property measures it first."""
        if self._frozen.probe is None:
            self.measure()
        assert self._frozen.probe is not None
        return self._frozen.probe

    @property
    def layer_lora(self) -> LayerLoRA | None:
        return self.state.layer_lora

    @property
    def probe(self) -> KLProbe:
        """The KL probe under the base LoRA in use and the last measured layer LoRA; if no layer LoRA was
        measured, the KL probe under the base LoRA alone."""
        return self._layers.probe or self.probed_base.probe

    @property
    def combined_lora(self) -> BaseLoRA | None:
        """The base and the layer LoRA in use, combined into one LoRA; None if there is neither."""
        return self._layers.combined_lora(self.base, self.layer_lora)

    @property
    def nbytes(self) -> int:
        """The number of bytes that the adapter's weights and the KL probes take in memory."""
        bases = sum(base.nbytes for base in self._bases.values())
        probes = sum(probed.probe.nbytes for probed in self._probed.values())
        own = self.state.micro.nbytes + (self.layer_lora.nbytes if self.layer_lora else 0)
        frozen = self._frozen.probe.nbytes if self._frozen.probe is not None else 0
        return own + frozen + self._whole.nbytes + bases + probes + self._layers.nbytes

    @property
    def differs(self) -> bool:
        """True if the weights in use differ from the weights of the original model."""
        moves = self.layer_lora is not None and self.layer_lora.moves
        return self.base is not None or self.state.micro.norm > 0 or moves

    # -- loading versions from the store -------------------------------------------------------------

    def catch_up(self) -> None:
        """If an undo or another process has changed the adapter version in use, load that version from the
        store."""
        version = self.history.version()
        if version != self.state.version:
            self._use(self.load(version))

    def reload(self) -> None:
        """Load the version in use from the store, and drop the weights in memory, which can differ from the
        store because a commit failed."""
        self.history.failures += 1
        self._use(self.load(self.history.version()))

    def _use(self, state: LearnerState) -> None:
        if state.base != self.state.base:
            if left := self._probed.get(self.state.base):
                self._probed[self.state.base] = left.without_probabilities()
            self.base = self._load_base(state.base)
            self._set(self.base)
            self._layers.forget_probe()
        elif not (state.layer_lora and state.layer_lora.moves):
            self._layers.forget_probe()
        self.state = state
        if self._frozen.change_rank(state.micro.rank):
            self._probed.clear()
            self._layers.forget_probe()

    def load(self, version: int) -> LearnerState:
        """Return the weights of a stored adapter version (0: the original model). Raises NotFound if the
        store no longer has these weights."""
        config = self._model.shape
        if version == 0:
            blank = np.zeros((config.hidden_size, self._frozen.rank), np.float32)
            directions = blank if self._frozen.probe is None else self._frozen.probe.directions
            return LearnerState(MicroLoRA.fresh(directions, config.vocab_size), 0, 0, 0.0)
        row = self.history.adapter(version)
        micro = MicroLoRA.from_bytes(row.state, config.hidden_size, config.vocab_size)
        return LearnerState(micro, row.base, version, row.kl, unpack_layers(row.state, config))

    # -- the backend's LoRA --------------------------------------------------------------------------

    def install(self) -> None:
        """Install the combined LoRA in the backend. Call this function only between replies, because KV
        caches that were computed with another LoRA become invalid."""
        self._set(self.combined_lora)

    def install_base(self) -> None:
        """Install the combined LoRA, unless the LoRA in the backend already contains the base LoRA in use. If
        the backend's LoRA contains this base LoRA, the backend keeps its LoRA, even if that LoRA has an older
        layer LoRA."""
        if not self._layers.has_base(self.backend.lora, self.base):
            self.install()

    @contextmanager
    def install_for(self, lora: BaseLoRA | None) -> Iterator[None]:
        """Run the backend with `lora` (None: the original model) inside the with-block. At the end of the
        with-block, install the combined LoRA in use again."""
        self._set(lora)
        try:
            yield
        finally:
            self.install()

    def replay_lora(self, state: LearnerState) -> BaseLoRA | None:
        """Return the LoRA with which the backend reads a reply again to compute its trace under `state`. The
        base LoRA of `state` must be the base LoRA in use."""
        return self._layers.combined_once(self.base, state.layer_lora)

    def _set(self, lora: BaseLoRA | None) -> None:
        if self.backend.lora is not lora:
            self.backend.set_lora(lora)

    # -- the KL probe --------------------------------------------------------------------------------

    def probe_base(self, lora: BaseLoRA, pause: Pause | None = None) -> ProbedBase:
        """Measure the KL probe under the base LoRA `lora` in the form in which it will run (`convert`), and
        return this form and the probe. After the call, this form is still the backend's LoRA. Call this
        function only in a with-block that sets the backend's LoRA back at its end, such as `install_for`.

        pause: a function that is called every few tokens; it can raise an exception to stop the measurement
        """
        if not {"probabilities", "packed_probs"} <= vars(self.frozen_probe).keys():
            self.backend.set_lora(None)
            self.frozen_probe.look(pause or (lambda: None))  # `look` needs the original model's output head
        whole, lora = self._whole.read(self.frozen_probe, pause), self.convert(lora)
        self.backend.set_lora(lora)
        context, tokenizer = self._model.shape.max_context, self._model.tokenizer
        return ProbedBase(
            lora, probe_under(self.frozen_probe, whole, self.backend, tokenizer, context, pause)
        )

    def kl_of_base(self, lora: BaseLoRA, pause: Pause | None = None) -> float:
        """Return the KL of the base LoRA `lora` in answers, nats per token. Call this function as
        `probe_base` is called. The model reads no prose, so this function takes a third of the time."""
        whole = self._whole.read(self.frozen_probe, pause)
        self.backend.set_lora(self.convert(lora))
        context = self._model.shape.max_context
        return kl_in_answers(whole, self.backend, self._model.tokenizer, context, pause)

    @property
    def probed_base(self) -> ProbedBase:
        """The base LoRA in use with the KL probe under it. If the probe is unknown, this property measures it
        first."""
        if self.base is None:
            return ProbedBase(None, self.frozen_probe)
        self.measure()
        return self._probed[self.state.base]

    def remember(self, base: int, probed: ProbedBase) -> None:
        """Keep a base LoRA and its KL probe in memory. base: the id that the store has given to the base LoRA
        after its probe was measured."""
        assert probed.lora is not None
        self._bases[base], self._probed[base] = probed.lora, probed

    def _load_base(self, base: int) -> BaseLoRA | None:
        """Return the base LoRA with this id, from memory or from the store; None for id 0 (no base LoRA)."""
        if base == 0:
            return None
        known = self._bases.pop(base, None) or self.convert(self.history.base(base))
        self._bases[base] = known
        while len(self._bases) > _BASES_IN_MEMORY:
            self._probed.pop(self._bases.popitem(last=False)[0], None)
        return known

    def convert(self, lora: BaseLoRA) -> BaseLoRA:
        """Return a base LoRA in the form in which it runs: with 4 bits per weight if the setting says so."""
        return lora.to_4_bits() if self._bits == 4 else lora

    def _stored_probe(self) -> KLProbe | None:
        """Return the KL probe of the model without any adapter, from the store or else from this package;
        None if neither has the probe."""
        fingerprint = self._model.fingerprint
        stored = self._store.model_data.reference_text(fingerprint) or shipped_bytes("probes", fingerprint)
        eos = np.array(sorted(self._model.tokenizer.eos_ids))
        return KLProbe.from_bytes(stored, self.backend.head, eos) if stored else None


def is_blank(adapter: MicroLoRA) -> bool:
    """Return True if the adapter is blank: it was made before the model's KL probe was known, so its lora_a
    is zero."""
    return not adapter.lora_a.any()
