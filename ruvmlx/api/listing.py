"""What is on this machine: models, and adapters of all of them."""

from pathlib import Path

from ..settings import store_file
from .types import AdapterInfo, ModelInfo


def list_models() -> list[ModelInfo]:
    """The starter model, then the models in the Hugging Face cache, of ollama and of LM Studio; no weights
    are read."""
    from ..models.find.local import list_local_models

    return [ModelInfo(**row | {"path": Path(row["path"])}) for row in list_local_models()]


def list_adapters() -> list[AdapterInfo]:
    """The adapters of all models."""
    from ..store import Store

    rows = Store(store_file()).adapters.all()
    return [AdapterInfo(row.name, row.model or row.fingerprint, row.version, row.bytes) for row in rows]
