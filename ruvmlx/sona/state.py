"""This module defines the state of a learner (weights with their version, and the base under them) and the
result of a rating."""

from dataclasses import dataclass

from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.layer_lora import LayerLoRA
from .kl_probe import KLProbe


@dataclass(frozen=True)
class RatingResult:
    """The effect of a rating.

    logprob_before, logprob_after: the rated reply's mean log-probability per token before and after the
        rating (nats)
    kl, kl_cap: the KL to the frozen model and its maximum, nats per token
    apply_us, total_us: the time of the update alone and of the whole rating, microseconds
    reason: a key of `REASONS`, or "".
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


@dataclass(frozen=True)
class PreferenceResult:
    """The effect of a preference.

    better, worse: the ids of the replies
    kind, strength: see PreferenceRow (store)
    margin_before, margin_after: the better reply's mean log-probability per token minus the worse reply's
        (nats)
    kl, kl_cap: the KL to the frozen model and its maximum, nats per token
    apply_us, total_us: the time of the update alone and of the whole preference, microseconds
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
    """Weights, their version and their KL to the frozen model (nats per token).

    base: the id of the BaseLoRA under the MicroLoRA; 0 if there is no BaseLoRA
    layer_lora: the changes below the head that ratings made
    """

    micro: MicroLoRA
    base: int
    version: int
    kl: float
    layer_lora: LayerLoRA | None = None


@dataclass(frozen=True)
class ProbedBase:
    """A base LoRA (None: the frozen model), and the KL probe under this base."""

    lora: BaseLoRA | None
    probe: KLProbe
