"""Model name -> local files -> validated weights -> Model + tokenizer.

from ruvmlx.models import find_model, list_local_models, load_model
"""

from typing import Any

__all__ = ["find_model", "list_local_models", "load_model"]
_HOMES = {"load_model": "load", "list_local_models": "local", "find_model": "resolve"}


def __getattr__(name: str) -> Any:
    """Imported when asked for: start-up time counts."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
