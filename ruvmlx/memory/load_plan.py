"""This module plans which backend runs a model and how much memory the model needs, and checks that the model
fits, before the program reads the weights."""

from dataclasses import dataclass, replace
from pathlib import Path

from .. import settings
from ..backends.select import Choice, for_model
from ..backends.weight_bytes import bytes_of_shard, bytes_of_weights, hybrid_limit
from ..errors import RuvmlxError
from ..kv.cache import SLACK
from ..models.config.header_facts import Facts
from ..models.config.model import Model, ModelConfig, ModelShape
from ..models.find.variants import FileChoice
from ..models.load import load_model
from ..models.weights.load_progress import watched_weights
from ..platform import cpu
from ..progress import QUIET, Progress, Watch, parameters
from ..text import size

CONTEXT = 4096  # the number of tokens of the KV cache that the estimate includes
# Bytes that a model needs in addition to its weights and its KV cache. PROGRAM: bytes of the program itself.
# PER_WORD: bytes for each token of the vocabulary, for the adapter and the measurement of the KL divergence.
# A measurement gave 268 MB for the starter model, with 49,152 tokens in its vocabulary, at its first opening
# (native backend, x86-64).
PROGRAM, PER_WORD = 170 << 20, 2048
STATES = 8  # an encoder holds at most this number of states of each token: input, queries, keys, values...


class NotEnoughMemory(RuvmlxError):
    """The machine has too little memory for the model."""


@dataclass(frozen=True)
class Need:
    """The number of bytes of memory that a model needs for its weights, for its KV cache, and for the program
    with learning."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work

    @classmethod
    def of(cls, facts: Facts, backend: Choice, context: int | None = None) -> "Need":
        """Return the bytes that a model needs. context: the number of tokens in the KV cache; None: CONTEXT.
        If the model's own maximum context is smaller, that number of tokens is used."""
        shape, tokens = facts.shape, min(facts.shape.max_context, context or CONTEXT)
        each = token_bytes(shape, backend.ranks) * cached_tokens(shape, tokens)
        if not shape.writes:  # an encoder keeps nothing of a text, and learns nothing
            return cls(weight_bytes(facts, backend), 0, PROGRAM + each)
        return cls(weight_bytes(facts, backend), each, PROGRAM + PER_WORD * shape.vocab_size)


def token_bytes(shape: ModelShape, ranks: int = 1) -> int:
    """Return the bytes of one token's keys and values in 16 bits, in one of `ranks` processes.

    For a model that only mlx-lm can run, the function uses the width of the hidden states as the width of the
    keys. For all but a few architectures, the result is then an upper bound. For an encoder, the bytes are
    those of a token's states while a text is read."""
    width = shape.hidden_size
    if not shape.writes:
        return 4 * STATES * width
    if isinstance(shape, ModelConfig):
        width = shape.n_kv_heads * shape.head_dim
    return 2 * shape.n_layers * width * 2 // ranks


def cached_tokens(shape: ModelShape, context: int) -> int:
    """Return how many of a context's tokens the KV cache holds. A model with a sliding window keeps only the
    tokens of the window and about SLACK tokens more."""
    window = shape.sliding_window if isinstance(shape, ModelConfig) else None
    return min(context, window + SLACK) if window else context


@dataclass(frozen=True)
class Fit:
    """The memory that a model needs, and the longest context with which the model fits this machine. weights,
    work (the program and learning), kv_per_token (16-bit keys and values) and limit (the maximum for one
    model) are bytes.
    longest_context: a number of tokens; 0 if the weights and the program leave no room for a token."""

    weights: int
    work: int
    kv_per_token: int
    limit: int
    longest_context: int

    @classmethod
    def of(cls, facts: Facts, backend: Choice, memory: "MachineMemory | None" = None) -> "Fit":
        """memory: the memory of this machine; None: the memory now."""
        need, shape, limit = (
            Need.of(facts, backend),
            facts.shape,
            (memory or MachineMemory.now(backend)).limit,
        )
        fit = cls(need.weights, need.work, token_bytes(shape, backend.ranks), limit, shape.max_context)
        return (
            fit
            if cached_tokens(shape, shape.max_context) <= fit.room
            else replace(fit, longest_context=fit.room)
        )

    @property
    def fits(self) -> bool:
        return self.longest_context > 0

    @property
    def room(self) -> int:
        """Return the number of tokens for which this machine's memory has room."""
        return max(0, self.limit - self.weights - self.work) // self.kv_per_token

    def words(self, whole: str = "chat") -> str:
        """Return one line for the user: whether the model fits, the bytes for each purpose, and the longest
        context. whole: what the model reads, "chat" or "text"."""
        parts = (
            f"{size(self.weights)} for the weights, {size(self.work)} for the program and learning, "
            f"{size(self.kv_per_token * 1000)} for each 1,000 tokens of a {whole}. "
            f"This machine can give its models and chats {size(self.limit)}."
        )
        if not self.fits:
            return f"does not fit: {parts}"
        whose = "this machine's memory" if self.longest_context == self.room else "the model"
        return (
            f"fits: {parts} A {whole} can have {self.longest_context:,} tokens: that is the limit of {whose}."
        )


def weight_bytes(facts: Facts, backend: Choice) -> int:
    """Return the number of bytes that the weights take in memory. An encoder expands all weights but the
    vectors of the words."""
    if not facts.shape.writes:
        words = facts.shape.vocab_size * facts.shape.hidden_size
        return 4 * (facts.parameters - words) + words * facts.bytes // facts.parameters
    whole = bytes_of_weights(facts.types, facts.bytes, facts.parameters, backend.name, backend.device)
    return bytes_of_shard(facts.shape, facts.parameters, whole, backend.ranks) if backend.ranks > 1 else whole


@dataclass(frozen=True)
class MachineMemory:
    """The machine's memory in bytes. available: the number of bytes that this process can still allocate.
    limit: the maximum number of bytes for one model. chosen: the setting memory_limit; 0: not set."""

    total: int
    available: int
    limit: int
    chosen: int = 0

    @classmethod
    def now(cls, backend: Choice, chosen: int = 0) -> "MachineMemory":
        total, available, device = cpu.total_memory(), cpu.available_memory(), backend.device
        one = cpu.memory_limit(device == "metal")
        limit = hybrid_limit(device) if backend.name == "hybrid" else one
        return cls(total, available, min(limit, chosen) if chosen else limit, chosen)

    def room(self, held: int) -> int:
        """Return the bytes for one model. held: the number of bytes that the program will free before the
        model needs them; below 0: bytes that another model will take."""
        return min(self.limit + held, self.chosen) if self.chosen else self.limit + held

    def words(self) -> str:
        """Return words that say why there is no more room."""
        if self.limit == self.chosen:
            return f"memory_limit is {size(self.chosen)}"
        return f"{size(self.available)} of {size(self.total)} are free"


@dataclass(frozen=True)
class Plan:
    """A plan to open a model: the model, its backend and the memory that it needs. chosen: the model's name
    that the user gave; None: the user gave no name."""

    facts: Facts
    backend: Choice
    need: Need
    memory: MachineMemory
    chosen: str | None
    data: Path

    @classmethod
    def of(
        cls, facts: Facts, backend: Choice, chosen: str | None, context: int | None = None, limit: int = 0
    ) -> "Plan":
        """limit: the setting memory_limit in bytes; 0: not set."""
        need, memory = Need.of(facts, backend, context), MachineMemory.now(backend, limit)
        return cls(facts, backend, need, memory, chosen, settings.home())

    @property
    def fits(self) -> bool:
        return self.need.total <= self.memory.limit

    def check(self, held: int = 0) -> None:
        """Raise NotEnoughMemory if the model does not fit. held: the number of bytes that the program will
        free before the model needs them; below 0: bytes that another model will take."""
        memory = (
            self.memory if self.fits else MachineMemory.now(self.backend, self.memory.chosen)
        )  # measure again, because the watch can have freed memory
        if self.need.total <= memory.room(held):
            return
        why, memory = memory.words(), replace(memory, limit=memory.room(min(held, 0)))
        shorter = Fit.of(self.facts, self.backend, memory).longest_context // 256 * 256
        instead = f"With --max-context {shorter} it fits. " if shorter else ""
        raise NotEnoughMemory(
            f"{self.facts.name} needs about {size(self.need.total)} of memory; there is room for "
            f"{size(max(0, memory.limit))} ({why}). {instead}"
            f"{_what_fits(memory, self.backend)}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return pairs (label, text) that describe the plan to the user."""
        f, m = self.facts, self.memory
        why = f"chosen as {self.chosen}" if self.chosen else "the starter model: no other was chosen"
        shape = f"{parameters(f.parameters)} parameters of {f.bits:.1f} bits, {size(f.bytes)} on the disk"
        if f.to_fetch:
            shape += f", of which {size(f.to_fetch)} are to be fetched from Hugging Face"
        free = f"{size(m.available)} of {size(m.total)} are free"
        tight = "" if self.need.total <= m.available else "; other programs will have to give way"
        kernels = self.backend.kernels
        named = kernels if kernels.startswith(self.backend.name) else f"{self.backend.name} on {kernels}"
        return [
            ("model", f"{f.name} ({why})" if self.chosen != f.name else f.name),
            ("size", shape),
            ("runs on", f"{named}: {self.backend.why}"),
            ("memory", f"about {size(self.need.total)}; {free}{tight}"),
            ("your data", str(self.data)),
        ]


class Planning(Watch):
    """A watch that makes a plan when the model's files are known, reports the plan to another watch and
    checks that the model fits."""

    def __init__(
        self,
        watch: Watch,
        backend: Choice,
        chosen: str | None,
        name: str = "auto",
        context: int | None = None,
        limit: int = 0,
    ):
        """chosen: the requested model. name: the requested backend. context: the number of tokens in the KV
        cache. limit: the setting memory_limit in bytes; 0: not set."""
        self._watch, self._backend, self._chosen, self._name = watch, backend, chosen, name
        self._context, self._limit = context, limit
        self.plan: Plan | None = None  # the newest plan

    def note_facts(self, facts: Facts) -> None:
        self._watch.note_facts(facts)
        backend = for_model(self._backend, self._name, facts.shape)
        plan = self.plan = Plan.of(facts, backend, self._chosen, self._context, self._limit)
        self._watch.note_plan(plan)
        # a download takes long enough to free the `held` bytes meanwhile
        plan.check(self._watch.held if facts.to_fetch else 0)

    def note_choice(self, choice: FileChoice) -> None:
        """Before a download, raise NotEnoughMemory if the chosen file alone exceeds the memory limit plus the
        bytes that the watch will free."""
        self._watch.note_choice(choice)
        memory = MachineMemory.now(self._backend, self._limit)
        limit = memory.room(self._watch.held)
        if choice.bytes > limit:
            raise NotEnoughMemory(
                f"{choice.chosen.files[0]} of {choice.name} has {size(choice.bytes)}; there is room for "
                f"{size(limit)}. {_what_fits(replace(memory, limit=limit), self._backend)}"
            )

    def progress(self, progress: Progress) -> None:
        self._watch.progress(progress)

    def load(self, name: str | None) -> Model:
        """Load a model and download it if needed. Raises NotEnoughMemory if the model does not fit."""
        model = load_model(name, self)
        self.note_facts(Facts.of(model))
        return replace(model, context_limit=self._context)

    def watched_model(self, model: Model) -> Model:
        """Return the model with a weight loader that reports its progress to the watch. Return `model` itself
        if nobody watches or if mlx-lm's code loads the model."""
        if self._watch is QUIET or not model.is_own:
            return model
        return replace(model, load_weights=lambda: watched_weights(model, self))


def _what_fits(memory: MachineMemory, backend: Choice) -> str:
    """Return a sentence that names at most three models on this machine, the largest that fit into the
    memory, or that says that none fits."""
    from ..models.find.local import readable_models

    known = [(f.name, Need.of(f, backend).total) for f in readable_models() if not f.embeds]
    fitting = sorted((total, name) for name, total in known if total <= memory.limit)
    instead = "raise memory_limit" if memory.limit == memory.chosen else "close other programs"
    if not fitting:
        return f"No model on this machine fits; {instead}."
    names = ", ".join(f"{name} ({size(total)})" for total, name in reversed(fitting[-3:]))
    return f"These fit: {names}. Or {instead}."
