"""What a learner holds: weights with their version, what they stand on, and what a rating did to them."""

from dataclasses import dataclass

from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.layer_lora import BodyLoRA
from .kl_probe import Neutral


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


@dataclass(frozen=True)
class State:
    """Weights, their version and their distance to the frozen model, nats per token.

    base: id of the BaseLoRA that the micro stands on, 0: none. body: what ratings changed below the head.
    """

    micro: MicroLoRA
    base: int
    version: int
    kl: float
    body: BodyLoRA | None = None


@dataclass(frozen=True)
class Ground:
    """What MicroLoRA stands on: a base (None: the frozen model) and the neutral text as it is read there."""

    lora: BaseLoRA | None
    neutral: Neutral
