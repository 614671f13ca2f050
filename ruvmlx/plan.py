"""What opening a model will use, and whether this machine has it: known before weights are read."""

from dataclasses import dataclass, replace
from pathlib import Path

from . import settings
from .backends.select import Choice, for_model
from .errors import RuvmlxError
from .models.asking import watched_weights
from .models.facts import Facts
from .models.load import load_model
from .models.model import Model, ModelConfig, ModelShape
from .platform import cpu
from .progress import QUIET, Progress, Watch, megabytes, parameters

CONTEXT = 4096  # tokens of keys and values that are counted in
# Beyond weights and cache: the program, and what learning knows of the model. The starter model, whose
# vocabulary is 49,152, has come to 268 MB on its first opening (native backend, x86-64).
PROGRAM, PER_WORD = 170 << 20, 2048
SPARE = 0.95  # of what is free
GPU_SHARE = 0.75  # of unified memory that Metal lets one process have, about


class NotEnoughMemory(RuvmlxError):
    """A model that this machine has no room for."""


@dataclass(frozen=True)
class Need:
    """Bytes that a model will take."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work

    @classmethod
    def of(cls, facts: Facts, backend: Choice) -> "Need":
        work = PROGRAM + PER_WORD * facts.shape.vocab_size
        return cls(_held(facts, backend), _cache_bytes(facts.shape), work)


def _cache_bytes(shape: ModelShape) -> int:
    """Keys and values of CONTEXT tokens in 16 bits. Of a model that only mlx-lm runs: as if its heads filled
    the hidden states, which is an upper bound for all but a few."""
    width = shape.hidden_size
    if isinstance(shape, ModelConfig):
        width = shape.n_kv_heads * shape.head_dim
    return 2 * shape.n_layers * width * 2 * min(shape.max_context, CONTEXT)


def _held(facts: Facts, backend: Choice) -> int:
    """Bytes of the weights in memory: the C decoder and GPUs keep what is stored, the others unpack it."""
    whole = 4 * facts.parameters
    if backend.name == "reference":
        return whole
    if backend.name == "mlx" and backend.device == "cpu" and whole <= cpu.total_memory() / 4:
        return whole
    return facts.bytes


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of the machine. limit: what one model may take, whatever is going on; available: what is free."""

    total: int
    available: int
    limit: int

    @classmethod
    def now(cls, backend: Choice) -> "MachineMemory":
        total, available = cpu.total_memory(), cpu.available_memory()
        # macOS makes room by itself, as far as the GPU may go; elsewhere what is not free ends the process.
        limit = int(total * GPU_SHARE) if backend.device == "metal" else int(available * SPARE)
        return cls(total, available, limit)


@dataclass(frozen=True)
class Plan:
    """A model, what it runs on, what that takes. chosen: the name that was asked for; None: nobody chose."""

    facts: Facts
    backend: Choice
    need: Need
    memory: MachineMemory
    chosen: str | None
    data: Path

    @classmethod
    def of(cls, facts: Facts, backend: Choice, chosen: str | None) -> "Plan":
        return cls(
            facts, backend, Need.of(facts, backend), MachineMemory.now(backend), chosen, settings.home()
        )

    @property
    def fits(self) -> bool:
        return self.need.total <= self.memory.limit

    def check(self, held: int = 0) -> None:
        """NotEnoughMemory where it does not fit, with what would. held: bytes that will be given back."""
        memory = (
            self.memory if self.fits else MachineMemory.now(self.backend)
        )  # room may have been made since
        if self.need.total <= memory.limit + held:
            return
        raise NotEnoughMemory(
            f"{self.facts.name} needs about {megabytes(self.need.total)} of memory; there is room for "
            f"{megabytes(max(0, memory.limit))} ({megabytes(memory.available)} of "
            f"{megabytes(memory.total)} are free). {_what_fits(memory.limit, self.backend)}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """A word, and what stands beside it; for people."""
        f, m = self.facts, self.memory
        why = f"chosen as {self.chosen}" if self.chosen else "the starter model: no other was chosen"
        size = f"{parameters(f.parameters)} parameters of {f.bits:.1f} bits, {megabytes(f.bytes)} on the disk"
        if f.to_fetch:
            size += f", of which {megabytes(f.to_fetch)} are to be fetched from Hugging Face"
        free = f"{megabytes(m.available)} of {megabytes(m.total)} are free"
        tight = "" if self.need.total <= m.available else "; other programs will have to give way"
        kernels = self.backend.kernels
        named = kernels if kernels.startswith(self.backend.name) else f"{self.backend.name} on {kernels}"
        return [
            ("model", f"{f.name} ({why})" if self.chosen != f.name else f.name),
            ("size", size),
            ("runs on", f"{named}: {self.backend.why}"),
            ("memory", f"about {megabytes(self.need.total)}; {free}{tight}"),
            ("your data", str(self.data)),
        ]


class Planning(Watch):
    """Makes a plan of what is found, tells it, and checks it."""

    def __init__(self, watch: Watch, backend: Choice, chosen: str | None, name: str = "auto"):
        """chosen: the model that was asked for; name: the backend that was."""
        self._watch, self._backend, self._chosen, self._name = watch, backend, chosen, name

    def found(self, facts: Facts) -> None:
        self._watch.found(facts)
        backend = for_model(self._backend, self._name, facts.shape)
        plan = Plan.of(facts, backend, self._chosen)
        self._watch.planned(plan)
        plan.check(self._watch.held if facts.to_fetch else 0)  # what is held is there until weights are read

    def progress(self, progress: Progress) -> None:
        self._watch.progress(progress)

    def load(self, name: str | None) -> Model:
        """The model, fetched if need be, which fits."""
        model = load_model(name, self)
        self.found(Facts.of(model))
        return model

    def counted(self, model: Model) -> Model:
        """The same model, whose weights the watch sees being read."""
        if self._watch is QUIET or not model.is_own:
            return model
        return replace(model, load_weights=lambda: watched_weights(model, self))


def _what_fits(limit: int, backend: Choice) -> str:
    """Models of this machine that would, or how large one may be."""
    from .models.local import sized

    known = [(f.name, Need.of(f, backend).total) for f in sized()]
    fitting = sorted((total, name) for name, total in known if total <= limit)
    if not fitting:
        return "No model that is here does; close other programs."
    names = ", ".join(f"{name} ({megabytes(total)})" for total, name in reversed(fitting[-3:]))
    return f"These fit: {names}. Or close other programs."
