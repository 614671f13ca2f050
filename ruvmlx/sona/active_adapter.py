"""This module holds the adapter in use: its weights, the base LoRA under them, and the KL probe under that
base. The KL probe (kl_probe.py) measures how far an adapter is from the model without an adapter.

After an undo, a rollback or another process's rating, the adapter loads the version that the store has. The
adapter also keeps the backend's LoRA equal to these weights.

Nothing is measured when the adapter is opened. But a rating needs two measurements: of the model (made once,
then stored), and of the base LoRA if its KL probe is not in memory. The measurements are made while the user
reads the first reply, or else by the first rating.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from ..backends.base import Backend, original_model, preserve_lora
from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.layer_lora import LayerLoRA, unpack_layers
from ..lora.micro_lora import RANK
from ..models.config.model import Model
from ..pausing import Pause
from ..progress import QUIET, Watch
from ..store import Store
from .adapter_history import AdapterHistory
from .base_probe import probe_under
from .calibration import Measured, Measurement
from .kl_probe import KLProbe
from .state import LearnerState, ProbedBase

_BASES_IN_MEMORY = 3


class LayerInstaller(Protocol):
    """The protocol of the part that combines a layer LoRA with the base and keeps the KL probe of the
    combination (optional/layer_adapter.py)."""

    @property
    def nbytes(self) -> int: ...

    @property
    def probe(self) -> KLProbe | None:
        """The last measured KL probe under base and layer LoRA; None if no probe was measured."""

    def forget_probe(self) -> None:
        """Discard the probe, because the base or the layer LoRA with which the probe was measured is no
        longer in use."""

    def combined_lora(self, base: BaseLoRA | None, layer_lora: LayerLoRA | None) -> BaseLoRA | None:
        """Return the base and the layer LoRA as one LoRA. The same arguments return the same object, because
        KV caches are tied to the object."""

    def combined_once(self, base: BaseLoRA | None, layer_lora: LayerLoRA | None) -> BaseLoRA | None:
        """Return the base and the layer LoRA as one LoRA for a single use. The cache of `combined_lora` keeps
        the combination that is in use."""

    def has_base(self, lora: BaseLoRA | None, base: BaseLoRA | None) -> bool:
        """Return True if `lora` is the base, or the newest combination with the base."""


class ActiveAdapter:
    """The adapter in use. Only the backend's thread may use this object."""

    def __init__(
        self, store: Store, model: Model, backend: Backend, history: AdapterHistory, layers: LayerInstaller
    ):
        self._store, self._model, self._layers = store, model, layers
        self.backend, self.history = backend, history
        self._measurement = Measurement(Measured.of(model, backend, RANK))
        self._probe = self._stored_probe()
        self._bases: OrderedDict[int, BaseLoRA] = OrderedDict()
        self._probed: dict[int, ProbedBase] = {}  # the probes of the bases in `_bases`
        self.state = self.load(history.version())
        self.base = self._load_base(self.state.base)
        backend.set_lora(self.base)

    # -- the measurement of the model ------------------------------------------------------------------

    @property
    def knows_model(self) -> bool:
        """True if the model's own KL probe is known. Before that, replies are traced with a blank adapter,
        whose lora_a is zero."""
        return self._probe is not None

    @property
    def is_measured(self) -> bool:
        """True if the KL probe in use is known: the probe under the base, or the model's own if there is no
        base."""
        return self.knows_model and (self.base is None or self.state.base in self._probed)

    def measure(self, pause: Pause | None = None, watch: Watch = QUIET) -> None:
        """Measure what is not yet measured: the model (measured once, then stored) and the base in use (once
        per process). The measurement takes seconds.

        pause: a function that may raise an exception to stop the measurement; the next call continues
        watch: an object that gets the progress of the model's measurement
        """
        if self._probe is None:
            self._probe = self._stored_probe()  # another process may have stored the probe
        if self._probe is None:
            with original_model(self.backend):
                self._probe = self._measurement.run(pause, watch)
            self._store.model_data.put_reference_text(self._model.fingerprint, self._probe.to_bytes())
        if self.state.version == 0 and is_blank(self.state.micro):
            self.state = self.load(0)
        if self.base is not None and self.state.base not in self._probed:
            with preserve_lora(self.backend):
                self._probed[self.state.base] = self.probe_base(self.base, pause)

    @property
    def frozen_probe(self) -> KLProbe:
        """The KL probe of the frozen model (the model without any adapter). An unknown probe is measured
        now."""
        if self._probe is None:
            self.measure()
        assert self._probe is not None
        return self._probe

    @property
    def layer_lora(self) -> LayerLoRA | None:
        return self.state.layer_lora

    @property
    def probe(self) -> KLProbe:
        """The KL probe under the base in use and the last measured layer LoRA."""
        return self._layers.probe or self.probed_base.probe

    @property
    def combined_lora(self) -> BaseLoRA | None:
        """The base and the layer LoRA in use, as one LoRA."""
        return self._layers.combined_lora(self.base, self.layer_lora)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the weights and of the KL probes."""
        bases = sum(base.nbytes for base in self._bases.values())
        probes = sum(probed.probe.nbytes for probed in self._probed.values())
        own = self.state.micro.nbytes + (self.layer_lora.nbytes if self.layer_lora else 0)
        frozen = self._probe.nbytes if self._probe is not None else 0
        return own + frozen + bases + probes + self._layers.nbytes

    @property
    def differs(self) -> bool:
        """True if the weights in use differ from the weights of the original model."""
        moves = self.layer_lora is not None and self.layer_lora.moves
        return self.base is not None or self.state.micro.norm > 0 or moves

    # -- in step with the store ----------------------------------------------------------------------

    def catch_up(self) -> None:
        """Load the version that the store has, if an undo or another process has made another version the
        current one."""
        version = self.history.version()
        if version != self.state.version:
            self._use(self.load(version))

    def reload(self) -> None:
        """Load the stored version, because the version in memory was never committed."""
        self._use(self.load(self.history.version()))

    def _use(self, state: LearnerState) -> None:
        if state.base != self.state.base:
            self.base = self._load_base(state.base)
            self._set(self.base)
            self._layers.forget_probe()
        elif not (state.layer_lora and state.layer_lora.moves):
            self._layers.forget_probe()
        self.state = state

    def load(self, version: int) -> LearnerState:
        """Return the weights of a stored version (0: the original model). Raises NotFound if the store no
        longer has these weights."""
        config = self._model.shape
        if version == 0:
            blank = np.zeros((config.hidden_size, RANK), np.float32)
            directions = blank if self._probe is None else self._probe.directions
            return LearnerState(MicroLoRA.fresh(directions, config.vocab_size), 0, 0, 0.0)
        row = self.history.adapter(version)
        micro = MicroLoRA.from_bytes(row.state, config.hidden_size, config.vocab_size)
        return LearnerState(micro, row.base, version, row.kl, unpack_layers(row.state, config))

    # -- the backend's LoRA --------------------------------------------------------------------------

    def install(self) -> None:
        """Install the current LoRA in the backend. Call this function only between replies, because older KV
        caches become stale."""
        self._set(self.combined_lora)

    def install_base(self) -> None:
        """Install the current LoRA, unless its base is already installed. An older layer LoRA beside that
        base stays."""
        if not self._layers.has_base(self.backend.lora, self.base):
            self.install()

    @contextmanager
    def install_for(self, lora: BaseLoRA | None) -> Iterator[None]:
        """Run the backend with `lora` (None: the original model) inside the with-block. At the end of the
        with-block, install the current LoRA again."""
        self._set(lora)
        try:
            yield
        finally:
            self.install()

    def replay_lora(self, state: LearnerState) -> BaseLoRA | None:
        """Return the LoRA with which the backend reads a reply again under `state`. The base of `state` must
        be the base in use."""
        return self._layers.combined_once(self.base, state.layer_lora)

    def _set(self, lora: BaseLoRA | None) -> None:
        if self.backend.lora is not lora:
            self.backend.set_lora(lora)

    # -- the KL probe --------------------------------------------------------------------------------

    def probe_base(self, lora: BaseLoRA, pause: Pause | None = None) -> ProbedBase:
        """Measure the KL probe under `lora`. `lora` stays in the backend. Call this function within
        `install_for`.

        pause: a function that is called every few tokens; it may raise an exception to stop
        """
        if not {"probabilities", "packed"} <= vars(self.frozen_probe).keys():
            self.backend.set_lora(None)
            self.frozen_probe.look(pause or (lambda: None))  # `look` needs the head of the original model
        self.backend.set_lora(lora)
        context = self._model.shape.max_context
        return ProbedBase(
            lora, probe_under(self.frozen_probe, self.backend, self._model.tokenizer, context, pause)
        )

    @property
    def probed_base(self) -> ProbedBase:
        """The base in use with its KL probe. An unknown probe is measured now."""
        if self.base is None:
            return ProbedBase(None, self.frozen_probe)
        self.measure()
        return self._probed[self.state.base]

    def remember(self, base: int, probed: ProbedBase) -> None:
        """Keep a base and its probe in memory. The base was measured before the store gave it this id."""
        assert probed.lora is not None
        self._bases[base], self._probed[base] = probed.lora, probed

    def _load_base(self, base: int) -> BaseLoRA | None:
        """Return a base LoRA by its id, from memory or from the store. Id 0 means no base."""
        if base == 0:
            return None
        known = self._bases.pop(base, None) or self.history.base(base)
        self._bases[base] = known
        while len(self._bases) > _BASES_IN_MEMORY:
            self._probed.pop(self._bases.popitem(last=False)[0], None)
        return known

    def _stored_probe(self) -> KLProbe | None:
        stored = self._store.model_data.reference_text(self._model.fingerprint)
        eos = np.array(sorted(self._model.tokenizer.eos_ids))
        return KLProbe.from_bytes(stored, self.backend.head, eos) if stored else None


def is_blank(adapter: MicroLoRA) -> bool:
    """Return True if the adapter was made before the model was measured. A blank adapter's lora_a is zero."""
    return not adapter.lora_a.any()
