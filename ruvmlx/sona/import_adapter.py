"""Adapters from elsewhere: measured like every other, then stored as version 1 of a new name."""

from dataclasses import dataclass

from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.interchange import divided
from ..store import Store
from .learner import Learner


@dataclass(frozen=True)
class Adopted:
    """kl: distance to the frozen model, nats per token on neutral text."""

    version: int
    kl: float


def adopt(store: Store, learner: Learner, change: BaseLoRA, name: str) -> Adopted:
    """Take a change in under a new name; `learner` is any learner of the model."""
    fingerprint, _ = learner.ledger._mine
    size = learner.micro.lora_b.shape[1]
    base, micro = divided(change, MicroLoRA.fresh(learner.frozen.directions, size))
    try:
        neutral = learner.ground(base).neutral if base else learner.frozen
        kl = neutral.kl(micro)
    finally:
        learner.stand()
    packed = base.to_bytes() if base else None
    return Adopted(store.adapters.add(fingerprint, name, micro.to_bytes(), packed, kl, micro.norm), kl)
