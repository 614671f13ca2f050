"""mlx-lm's modules without mlx-lm's start-up cost.

`import mlx_lm` imports transformers, which takes two seconds; its model files need none of that. A package
object stands in for it and runs the real __init__ only when one of the package's own names is used. So
`mlx_lm.models.llama` costs 50 ms, and a plain `import mlx_lm` later in the same process finds the real
package with the same submodules.
"""

import builtins
import functools
import importlib
import importlib.util
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

from ..errors import RuvmlxError
from . import mx  # noqa: F401  platform.mx must import MLX first

_lock = threading.RLock()

# What mlx_lm.utils imports for tokenizers and downloads: module as written there -> names.
_NOT_FOR_LOADING = {
    "tokenizer_utils": ("TokenizerWrapper", "load"),  # imports transformers: a second
    "huggingface_hub": ("snapshot_download",),
}


class _LazyPackage(ModuleType):
    """A package whose __init__ runs at the first use of a name that it does not have yet."""

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__version__" and name != "__all__":
            raise AttributeError(name)  # names that inspect and warnings look up on every module
        with _lock:
            if type(self) is _LazyPackage:
                self.__class__ = ModuleType  # type: ignore[assignment]  # its __init__ runs once
                self.__dict__["__loader__"].exec_module(self)
        return getattr(self, name)


def load(submodule: str) -> ModuleType:
    """`load("models.llama")` -> the module mlx_lm.models.llama."""
    with _lock:
        _package()
        return importlib.import_module(f"mlx_lm.{submodule}")


@functools.cache
def utils() -> ModuleType:
    """A copy of the module mlx_lm.utils that loads models, but neither tokenizers nor downloads.

    It is executed with an import statement that leaves those out, and with it 0.8 of 0.9 seconds.
    mlx_lm.utils itself is imported only if that copy cannot be executed.
    """
    with _lock:
        _package()
        spec = importlib.util.find_spec("mlx_lm.utils")
        if spec is None or spec.loader is None or "mlx_lm.utils" in sys.modules:
            return load("utils")
        copy = importlib.util.module_from_spec(spec)
        copy.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import_for_loading}
        try:
            spec.loader.exec_module(copy)
        except Exception:  # noqa: BLE001 - another version, which uses these names while it is imported
            return load("utils")
        return copy


def _import_for_loading(name: str, *how: Any) -> Any:
    """The import statement of `utils`: None for each name that loading does without."""
    if name in _NOT_FOR_LOADING:
        return SimpleNamespace(**dict.fromkeys(_NOT_FOR_LOADING[name]))
    return builtins.__import__(name, *how)


def _package() -> None:
    """Put the lazy package in place, unless mlx-lm was imported already."""
    if "mlx_lm" not in sys.modules:
        spec = importlib.util.find_spec("mlx_lm")
        if spec is None:
            raise RuvmlxError("mlx-lm is not installed; install it with: pip install mlx-lm")
        sys.modules["mlx_lm"] = _lazy(spec)


def _lazy(spec) -> ModuleType:
    package = _LazyPackage("mlx_lm")
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
    package.__package__, package.__file__, package.__loader__ = "mlx_lm", spec.origin, spec.loader
    return package
