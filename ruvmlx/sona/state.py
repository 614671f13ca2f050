"""This module defines the state of a learner (learner.py): its weights, their adapter version, their KL, and
the id of their base LoRA. The module also defines the results of a rating and of a preference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.layer_lora import LayerLoRA
from .kl_probe import KLProbe
from .trace import Trace


@dataclass(frozen=True)
class RatingResult:
    """The effect of a rating on the adapter's weights.

    applied: True if the rating changed the adapter
    logprob_before, logprob_after: the rated reply's mean log-probability per token before and after the
        rating (nats)
    kl, kl_cap: the KL to the frozen model after the rating, and its maximum, nats per token
    micro_norm: the norm of the MicroLoRA's change of weights
    apply_us, total_us: the duration of the update alone and of the whole rating, microseconds
    reason: why the rating is bad, a key of `REASONS`; "" without a reason
    replaces: the reply's earlier rating, which this rating replaces; "" without an earlier rating
    """

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
    reason: str = ""
    replaces: str = ""


@dataclass(frozen=True)
class PreferenceResult:
    """The effect of a preference on the adapter's weights.

    better, worse: the ids of the two replies
    kind: "compare", "regenerated" or "edit"; strength: 1 for a clear choice, else less than 1 (PreferenceRow)
    margin_before, margin_after: the better reply's mean log-probability per token minus the worse reply's,
        before and after the preference (nats)
    kl, kl_cap: the KL to the frozen model after the preference, and its maximum, nats per token
    apply_us, total_us: the duration of the update alone and of the whole preference, microseconds
    """

    better: str
    worse: str
    kind: str
    strength: float
    applied: bool
    apply_us: float
    total_us: float
    margin_before: float
    margin_after: float
    kl: float
    kl_cap: float
    micro_norm: float
    adapter_version: int


@dataclass(frozen=True)
class LearnerState:
    """The weights of an adapter, their adapter version, and their KL to the frozen model (nats per token).

    micro: the MicroLoRA, which changes the output head
    base: the id of the BaseLoRA (made by a slow loop, or imported) that is active with the MicroLoRA; 0 if
        there is no BaseLoRA
    version: the adapter version; -1 while the weights are not stored
    layer_lora: the changes that ratings made to layers below the output head; None if ratings made no such
        changes
    """

    micro: MicroLoRA
    base: int
    version: int
    kl: float
    layer_lora: LayerLoRA | None = None


@dataclass(frozen=True)
class CommittedUpdate:
    """An update of the weights by one rating, a batch of ratings, or a preference. The store has the update.

    before, after: the states before and after the update
    traces: the traces of the rated replies, or of the better and the worse reply
    apply_us: the duration of the update alone, microseconds
    replaced: for each rated reply, the earlier rating that the new rating replaces; "" if there was none
    """

    before: LearnerState
    after: LearnerState
    traces: Sequence[Trace]
    apply_us: float
    replaced: Sequence[str] = ()

    @property
    def has_effect(self) -> bool:
        """Return True if the update changed the weights."""
        return self.after.micro is not self.before.micro or (
            self.after.layer_lora is not self.before.layer_lora
        )


@dataclass(frozen=True)
class ProbedBase:
    """A base LoRA (None: the frozen model), and the KL probe that was measured under this base LoRA."""

    lora: BaseLoRA | None
    probe: KLProbe

    @property
    def is_complete(self) -> bool:
        """False if the probe lacks its probabilities (`without_probabilities`)."""
        return self.probe.packed_ratio is not None

    def without_probabilities(self) -> "ProbedBase":
        """Return the base LoRA with a small KL probe, without the arrays that take most of a probe's memory:
        `packed_probs`, `packed_ratio` and `probabilities`. `complete_probe` computes these arrays again in a
        tenth of the time of a whole measurement."""
        return replace(self, probe=replace(self.probe, packed_ratio=None))
