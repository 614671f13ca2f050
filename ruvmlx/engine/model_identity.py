"""This module tells models apart in a store. The key of an adapter, a rating or a measurement in the store is
the fingerprint of a model. The fingerprint reads the bytes of a few tensors only. So two models can have the
same fingerprint, and the store gives the second of the two models another fingerprint."""

from dataclasses import replace

from ..errors import StoreError
from ..models.config.model import Model
from ..store import Store


def identify(store: Store, model: Model, claim: bool = True) -> Model:
    """Return a copy of the model whose fingerprint is the key of this model's data in the store.

    claim: True: if no model has the fingerprint yet, record in the store that the fingerprint belongs to this
        model. False: record nothing, because the caller only reads. While the store cannot be written, the
        call records nothing, too, and a later call does so.
    """
    content = model.content()
    try:
        own = store.model_data.own_fingerprint(model.fingerprint, content, claim)
    except StoreError:
        own = store.model_data.own_fingerprint(model.fingerprint, content, claim=False)
    return replace(model, fingerprint=own)
