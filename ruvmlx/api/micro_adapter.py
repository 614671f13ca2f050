"""This module is the part of the public API with which a program controls one adapter of an open model.

    with ruvmlx.open() as model:
        adapter = ruvmlx.MicroAdapter(model)
        for question in questions:
            adapter.accumulate(model.reply(question), "up")
        adapter.apply()                    # one update of the weights by all these ratings

The methods raise the errors of `ruvmlx.errors`, and any thread can call them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..errors import UsageError
from .arguments import NO_ADAPTER, check_adapter, check_count, check_number, check_text
from .model import LocalModel
from .replies import Reply, id_of

if TYPE_CHECKING:
    from ..runtime import Runtime
    from ..sona.adapter_history import LearnStatus
    from ..sona.learner import Learner
    from ..sona.rating_batch import BatchResult

T = TypeVar("T")


@dataclass(frozen=True)
class ChangedMatrix:
    """A matrix of the model that an adapter changes, or can change.

    module: such as "q_proj" or "lm_head". layer: its layer; 0 for lm_head and embed_tokens.
    inputs, outputs: the numbers of the matrix's inputs and outputs. The embedding has an input for each
        token.
    rank: the rank of the change. made_by: "rating" (MicroLoRA or layer LoRA) or "training" (base LoRA).
    """

    module: str
    layer: int
    inputs: int
    outputs: int
    rank: int
    made_by: str


@dataclass(frozen=True)
class MicroStatus:
    """What an adapter is, and what it has done.

    name, version: the adapter's name, and its version in use; 0: it has learned nothing.
    enabled: True if the model writes its replies with this adapter.
    matrices: the matrices that the adapter changes. rank, alpha: of the output head's MicroLoRA.
    ratings, updates: the ratings and preferences in force, and those of them that changed the weights.
    pending: the ratings that wait for `apply`.
    replies: the number of stored replies that this adapter wrote.
    uses, loads: how often the adapter was requested, and loaded from the disk, since the model was opened.
    bytes: the size of its weights in memory.
    """

    name: str
    version: int
    enabled: bool
    matrices: tuple[ChangedMatrix, ...]
    rank: int
    alpha: float
    ratings: int
    updates: int
    pending: int
    replies: int
    uses: int
    loads: int
    bytes: int


class MicroAdapter:
    """One adapter of an open model: gather ratings for one update, switch the adapter on and off, start it
    over, and count what it did.

    Ratings that wait are in memory until `apply`; the store and the weights do not change before.
    """

    def __init__(self, model: LocalModel, name: str | None = None):
        """name: the name of the adapter that this object changes; None: the adapter in use. Raises NotFound
        if `name` is None and no adapter is in use."""
        from ..sona.rating_batch import RatingBatch

        if not isinstance(model, LocalModel):
            raise UsageError(f"a MicroAdapter belongs to a LocalModel; got {type(model).__name__}.")
        if name == NO_ADAPTER:
            raise UsageError('the adapter "none" is no adapter; choose another name.')
        if name is not None:
            check_adapter(name)
        self._model, self._batch = model, RatingBatch()
        self.name: str = name or model._call(lambda runtime: runtime.learning.require_learner().history.name)

    # -- several ratings, one update -----------------------------------------------------------------

    @property
    def pending(self) -> int:
        """The number of ratings that wait for `apply`."""
        return self._batch.pending

    def accumulate(self, reply: Reply | str, rating: str | int, note: str = "") -> int:
        """Add a rating of a reply (or of the reply with this id), without a change of the weights. Return the
        number of ratings that wait. A second rating of a reply replaces the first.

        Raises UsageError for a rating other than "up", "down" or 1 to 5, NotFound for an unknown reply.
        """
        reply_id = id_of(reply)
        check_text(note, "a note")
        return self._with(lambda learner: self._batch.accumulate(learner, reply_id, str(rating), note))

    def apply(self) -> "BatchResult":
        """Update the weights by all ratings that wait, as one version that one `undo` takes back. Discard the
        ratings of deleted replies. Raises UsageError if no rating waits, and NotFound if all replies were
        deleted."""
        return self._with(self._batch.apply)

    def apply_with_ewc(self, version: int, strength: float = 1.0) -> "BatchResult":
        """Do the same as `apply`, with a penalty on changes of what an earlier version had learned (EWC).

        version: a version of this adapter. strength: the factor of the penalty, 0 or more; the larger, the
        nearer the weights stay to those of that version.
        """
        check_count(version, "the version")
        check_number(strength, "the strength of the penalty")
        return self._with(lambda learner: self._batch.apply_with_ewc(learner, version, strength))

    def reset(self) -> None:
        """Discard the ratings that wait for `apply`. The weights do not change."""
        self._batch.reset()

    # -- the whole adapter ---------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """True if the model writes its replies with this adapter."""
        return self._model._call(lambda runtime: _name_in_use(runtime) == self.name)

    def enable(self) -> None:
        """Let the model write its replies with this adapter."""
        self._model.use_adapter(self.name)

    def disable(self) -> None:
        """Let the model write its replies without an adapter, if this adapter is in use."""
        if self.is_enabled:
            self._model.use_adapter(None)

    def start_over(self) -> "LearnStatus":
        """Go back to the original model, as `ruvmlx learn reset` does. Ratings that wait are discarded. The
        versions stay on the disk, so `ruvmlx learn rollback` can return to one."""
        self.reset()
        return self._with(lambda learner: learner.history.rollback(0))

    @property
    def status(self) -> MicroStatus:
        """What the adapter is, and what it has done."""
        return self._model._call(self._status)

    def _status(self, runtime: "Runtime") -> MicroStatus:
        with runtime.learning.using(self.name) as learner:
            known, micro = learner.history.status(), learner.micro
            used = next(row for row in runtime.learning.residency.tiers() if row.name == self.name)
            return MicroStatus(
                self.name, known.adapter_version, _name_in_use(runtime) == self.name,
                _changed_matrices(learner), micro.rank, micro.alpha,
                known.ratings + known.preferences, known.updates, self.pending,
                runtime.store.replies.count(runtime.model.fingerprint, self.name),
                used.accesses, used.loads, used.bytes,
            )  # fmt: skip

    def _with(self, work: Callable[["Learner"], T]) -> T:
        """Run work(learner of this adapter) in the runtime's thread and return its result."""

        def run(runtime: "Runtime") -> T:
            with runtime.learning.using(self.name) as learner:
                return work(learner)

        return self._model._call(run)


def _name_in_use(runtime: "Runtime") -> str | None:
    learner = runtime.learning.learner
    return learner.history.name if learner is not None else None


def _sizes(lora_a: np.ndarray, lora_b: np.ndarray) -> tuple[int, int, int]:
    """Return (inputs, outputs, rank) of a change: lora_a [inputs, rank], lora_b [rank, outputs]."""
    return lora_a.shape[0], lora_b.shape[1], lora_a.shape[1]


def _changed_matrices(learner: "Learner") -> tuple[ChangedMatrix, ...]:
    """Return the matrices that an adapter changes: by ratings first, then by training."""
    micro, layers, base = learner.micro, learner.state.layer_lora, learner.base
    found = list[ChangedMatrix]()
    if learner.layers.targets.head:
        found.append(ChangedMatrix("lm_head", 0, *_sizes(micro.lora_a, micro.lora_b), "rating"))
    for pairs, made_by in (
        (layers.pairs if layers else {}, "rating"),
        (base.pairs if base else {}, "training"),
    ):
        for (module, layer), pair in pairs.items():
            found.append(ChangedMatrix(module, layer, *_sizes(*pair), made_by))
    return tuple(found)
