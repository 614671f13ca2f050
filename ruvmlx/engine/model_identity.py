"""This module tells models apart in a store. The store keeps adapters, ratings and measurements by a model's
fingerprint, and two models can have the same fingerprint if they differ only in a few tensors."""

from dataclasses import replace

from ..errors import StoreBusy
from ..models.config.model import Model
from ..store import Store


def identify(store: Store, model: Model, claim: bool = True) -> Model:
    """Return the model with the fingerprint under which the store keeps the data of this model.

    claim: True if a fingerprint that the store does not know belongs to this model from now on; False for a
        caller that only reads. If another process keeps the store locked, the next call can claim it.
    """
    content = model.content()
    try:
        own = store.model_data.own_fingerprint(model.fingerprint, content, claim)
    except StoreBusy:
        own = store.model_data.own_fingerprint(model.fingerprint, content, claim=False)
    return replace(model, fingerprint=own)
