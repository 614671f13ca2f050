"""This module puts a learner (learner.py) together. Some parts of a learner are in the package `optional` and
implement protocols of this package."""

from functools import partial

from ..backends.base import Backend
from ..lora.micro_lora import RANK
from ..models.config.model import Model
from ..platform.numpy_blas import NumpyThreads
from ..store import Store
from .active_adapter import ActiveAdapter
from .adapter_history import AdapterHistory
from .learner import Learner
from .optional.ewc import EWC
from .optional.layer_adapter import LayerAdapter
from .optional.layer_kl_guard import limit_layer_kl
from .rating_index import RatingIndex


def open_learner(
    store: Store, model: Model, backend: Backend, name: str = "default",
    learn: bool = True, implicit: bool = False, targets: str = "head", bits: int = 32, rank: int = RANK,
    layer_rank: int = 1,
) -> Learner:  # fmt: skip
    """Return the learner of one named adapter on one model. This function measures no KL probe; the first
    rating does, if no earlier call has (ActiveAdapter.measure).

    learn: False if the learner records and indexes ratings, but never changes weights
    implicit: True if the rating index also uses implicit feedback on unrated replies (signal.py)
    targets: the matrices that ratings change (lora/targets.py)
    bits: the bits of a weight of base LoRAs in memory, 32 or 4
    rank: the rank of the MicroLoRA of an adapter that begins, 1 or 2
    layer_rank: the rank of the change of each matrix below the head that begins to change, 1 or 2
    """
    # OpenBLAS's threads wait for each other in busy loops. If other programs keep the cores busy, a small
    # product takes up to fifty times as long with two threads as with one.
    NumpyThreads(1).adapt()
    layers = LayerAdapter(store, model, backend, targets, layer_rank)
    history = AdapterHistory(store, model.fingerprint, name, model.is_own)
    rating_index = RatingIndex(store, model, backend, history, implicit)
    active = ActiveAdapter(store, model, backend, history, layers, bits, rank)
    guard, anchors = partial(limit_layer_kl, layers), EWC(history)
    return Learner(store, model, active, rating_index, layers, guard, anchors, learn)
