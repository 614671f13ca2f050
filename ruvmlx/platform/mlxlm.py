"""This module imports mlx-lm's modules without mlx-lm's start-up cost.

`import mlx_lm` imports transformers, which takes two seconds. The model files of mlx-lm do not need
transformers. To avoid the import of transformers, this module registers a lazy package object as `mlx_lm`.
The lazy object runs mlx-lm's real `__init__` only when a program uses a name of the package itself. The
import of `mlx_lm.models.llama` then takes 50 ms, and a later `import mlx_lm` in the same process finds the
real package with the same submodules.
"""

import builtins
import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ..errors import RuvmlxError
from .mx import mx

_lock = threading.RLock()

# The modules that mlx_lm.utils imports only for tokenizers and downloads: {module name: imported names}.
_NOT_FOR_LOADING = {
    "tokenizer_utils": ("TokenizerWrapper", "load"),  # this module imports transformers, which takes 1 s
    "huggingface_hub": ("snapshot_download",),
}


class _LazyPackage(ModuleType):
    """A package whose __init__ runs when a program first uses a name that the package does not have yet."""

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__version__" and name != "__all__":
            # `inspect` and `warnings` ask every module for these names, so such a query must not run __init__
            raise AttributeError(name)
        with _lock:
            if type(self) is _LazyPackage:
                # from now on this is an ordinary module, so __init__ runs only once
                self.__class__ = ModuleType  # type: ignore[assignment]
                self.__dict__["__loader__"].exec_module(self)
        return getattr(self, name)


def load(submodule: str) -> ModuleType:
    """Return a submodule of mlx_lm: `load("models.llama")` returns mlx_lm.models.llama."""
    with _lock:
        _package()
        return importlib.import_module(f"mlx_lm.{submodule}")


@functools.cache
def utils() -> ModuleType:
    """Return a copy of the module mlx_lm.utils that can load models, but not tokenizers, and cannot download.

    The copy runs with an `__import__` that skips the imports for tokenizers and downloads. Without these
    imports, the copy takes 0.1 s in place of 0.9 s. If the copy fails, or if mlx_lm.utils was imported
    before, the function returns the real mlx_lm.utils.
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
        except Exception:  # noqa: BLE001 - another version of mlx-lm can use the skipped names at its import
            return load("utils")
        return copy


@contextmanager
def keyed_weights() -> Iterator[None]:
    """In the `with` block, give the random first weights of this thread's new layers a key. The weights of a
    file replace the first weights, so MLX never computes them.

    Without a key, MLX makes a random state for the thread. The end of the thread frees the state and takes
    Python's lock for it (MLX 0.32, python/src/random.cpp). If Python ends at the same time, the process
    aborts.
    """
    key, owner = mx.random.key(0), threading.get_ident()

    def with_key(draw: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def draw_with_key(*args: Any, **options: Any) -> mx.array:
            given = {"key": key} if threading.get_ident() == owner else {}
            return draw(*args, **given | options)

        return draw_with_key

    with _lock:
        own = {name: getattr(mx.random, name) for name in ("uniform", "normal")}
        try:
            for name, draw in own.items():
                setattr(mx.random, name, with_key(draw))
            yield
        finally:
            for name, draw in own.items():
                setattr(mx.random, name, draw)


def _import_for_loading(name: str, *how: Any) -> Any:
    """Import a module for the copy of mlx_lm.utils. If the module serves only tokenizers or downloads, return
    an object whose names have the value None."""
    if name in _NOT_FOR_LOADING:
        return SimpleNamespace(**dict.fromkeys(_NOT_FOR_LOADING[name]))
    return builtins.__import__(name, *how)


def _package() -> None:
    """Register the lazy package in sys.modules if mlx-lm was not imported before."""
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
