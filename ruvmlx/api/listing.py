"""This module lists the models on this machine and the adapters of all models."""

from contextlib import closing
from pathlib import Path

from ..settings import store_file
from .types import AdapterInfo, ModelInfo


def list_models() -> list[ModelInfo]:
    """Return the starter model, then the models in the Hugging Face cache, of ollama and of LM Studio. The
    function reads no weights."""
    from ..models.find.local import list_local_models

    return [ModelInfo(**row | {"path": Path(row["path"])}) for row in list_local_models()]


def list_adapters() -> list[AdapterInfo]:
    """Return the adapters of all models. An adapter exists once it has a version."""
    from ..store import Store

    with closing(Store(store_file(), reading=True)) as store:
        rows = store.adapters.all()
    return [AdapterInfo(row.name, row.model or row.fingerprint, row.version, row.bytes) for row in rows]
