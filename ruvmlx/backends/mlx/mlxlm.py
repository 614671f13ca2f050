"""mlx-lm's model graphs without mlx-lm's start-up cost.

`import mlx_lm` imports transformers, which takes two seconds; its model files need none of that. A package
object stands in for it and runs the real __init__ only when one of the package's own names is used. So
`mlx_lm.models.llama` costs 50 ms, and a plain `import mlx_lm` later in the same process finds the real
package with the same submodules.
"""

import importlib
import importlib.util
import sys
import threading
from types import ModuleType

from ...errors import RuvmlxError
from ...platform import mx  # noqa: F401  platform.mx must import MLX first

_lock = threading.RLock()


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
        if "mlx_lm" not in sys.modules:
            spec = importlib.util.find_spec("mlx_lm")
            if spec is None:
                raise RuvmlxError("mlx-lm is not installed; install it with: pip install mlx-lm")
            sys.modules["mlx_lm"] = _lazy(spec)
        return importlib.import_module(f"mlx_lm.{submodule}")


def _lazy(spec) -> ModuleType:
    package = _LazyPackage("mlx_lm")
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
    package.__package__, package.__file__, package.__loader__ = "mlx_lm", spec.origin, spec.loader
    return package
