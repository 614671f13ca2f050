"""This module imports LoRA adapters of other tools. The module measures the KL divergence of an adapter from
the model without an adapter, and stores the adapter as version 1 under a new name."""

from dataclasses import dataclass

from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.interchange import divide_adapter
from ..store import Store
from .learner import Learner


@dataclass(frozen=True)
class ImportedAdapter:
    """An imported adapter. kl: the KL divergence of the model with this adapter from the frozen model (nats
    per token on the reference text)."""

    version: int
    kl: float


def import_adapter(store: Store, learner: Learner, change: BaseLoRA, name: str) -> ImportedAdapter:
    """Store a change of the model's matrices as an adapter under a new name. learner: a learner of this
    model, with any adapter."""
    active = learner.active
    size = learner.micro.lora_b.shape[1]
    base, micro = divide_adapter(change, MicroLoRA.fresh(active.frozen_probe.directions, size))
    with active.install_for(base):
        probe = active.probe_base(base).probe if base else active.frozen_probe
        kl = probe.kl(micro)
    packed = base.to_bytes() if base else None
    fingerprint = learner.history.fingerprint
    return ImportedAdapter(
        store.adapters.add(fingerprint, name, micro.to_bytes(), packed, kl, micro.norm), kl
    )
