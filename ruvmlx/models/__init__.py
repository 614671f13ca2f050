"""Models on this machine: from a model's name to its files, checked weights, a `Model` and its tokenizer.

from ruvmlx.models import find_model, list_local_models, load_model

The package reads files that it does not trust and checks every size in them. It may import `platform`, `text`
and `errors`, but no backend and nothing that computes with weights. Start with `load.py`, then
`config/model.py` (what a loaded model is) and `config/families.py` (what differs between architectures).
Its rooms, from the bottom to the top: `files`, `config`, `text`, `weights`, `find`.
"""

from typing import Any

__all__ = ["find_model", "list_local_models", "load_model"]
_HOMES = {"load_model": "load", "list_local_models": "find.local", "find_model": "find.resolve"}


def __getattr__(name: str) -> Any:
    """Import a name at its first use, because start-up time counts."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
