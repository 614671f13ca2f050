"""This package finds a model by its name, checks its files, and makes a `Model` with weights and a tokenizer.

from ruvmlx.models import find_model, list_local_models, load_model

The package does not trust the files of a model: it checks the sizes in the files before it allocates memory
for them. The package imports no backend; it imports mlx-lm only to ask whether mlx-lm knows a model type
(config/other_models.py). Start with `load.py`, then read `config/model.py` (the description of a loaded
model) and `config/families.py` (the differences between architectures). The packages inside this package are
`files`, `config`, `text`, `weights` and `find`; the later packages of this list import the earlier packages.
"""

from typing import Any

__all__ = ["find_model", "list_local_models", "load_model"]
_HOMES = {"load_model": "load", "list_local_models": "find.local", "find_model": "find.resolve"}


def __getattr__(name: str) -> Any:
    """Import one of the public names (`__all__`) at its first use, because an import of all modules would
    make the program start slowly."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
