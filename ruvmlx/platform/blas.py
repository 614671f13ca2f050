"""A fast BLAS under MLX on Linux, from pip alone.

MLX's Linux wheel calls a reference BLAS: 4-8 GFLOP/s on two cores. `preload` puts a small C library
(neon/src/blas_shim.c) into the global symbol scope before MLX is first loaded; libmlx.so then binds its
`cblas_sgemm` to it, and it forwards to the OpenBLAS of PyPI's scipy-openblas32: 250-430 GFLOP/s on the same
cores (512 x 512 x 512, float32; issue 2). macOS has Accelerate and needs nothing.

Only `ruvmlx.platform.mx` calls `preload`; everything else imports MLX from there.
"""

import ctypes
import functools
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from . import cpu

SHIM_ENV = "RUVMLX_BLAS_SHIM"  # another path of the C library; "off" keeps the reference BLAS


@dataclass
class Blas:
    """The library that MLX's CPU matrix products run on."""

    name: str  # "openblas 0.3.34", "accelerate", "reference"
    detail: str = ""  # the kernels that OpenBLAS chose, or why OpenBLAS is not used
    shim: ctypes.CDLL | None = None
    most: int = 1  # threads on an idle machine
    fixed: bool = False  # the user set the number of threads

    @property
    def fast(self) -> bool:
        return self.name != "reference"

    def calls(self) -> int:
        """Matrix products that went through the shim since the process started."""
        return self.shim.rvm_blas_calls() if self.shim else 0

    def threads(self) -> int:
        return self.shim.rvm_blas_get_threads() if self.shim else 0

    def set_threads(self, n: int) -> None:
        """Use n threads from now on, whatever else runs on the machine."""
        self.fixed = True
        if self.shim:
            self.shim.rvm_blas_set_threads(n)

    def adapt(self, others: float) -> None:
        """Use fewer threads while other processes keep `others` cores busy.

        OpenBLAS's threads wait for each other by spinning. On two cores shared with three busy processes, the
        starter model decodes at 0.9 tok/s with two threads and at 14 with one; on idle cores at 57 and 43.
        """
        if self.shim and not self.fixed:
            n = max(1, min(self.most, round((os.cpu_count() or 1) - others)))
            if n != self.threads():
                self.shim.rvm_blas_set_threads(n)


@functools.cache
def preload() -> Blas:
    """Load the BLAS, once. After the first import of mlx.core it is too late; `detail` then says so."""
    if sys.platform == "darwin":
        return Blas("accelerate")
    if sys.platform != "linux":
        return Blas("reference", f"nothing faster is known on {sys.platform}")
    if "mlx.core" in sys.modules:
        return Blas("reference", "mlx.core was imported before ruvmlx.backends: too late for OpenBLAS")
    if os.environ.get(SHIM_ENV) == "off":
        return Blas("reference", f"switched off by {SHIM_ENV}")
    shim, openblas = shim_path(), openblas_path()
    if not shim.is_file():
        return Blas("reference", f"the C library is not built: no {shim}")
    if openblas is None:
        return Blas("reference", "the Python package scipy-openblas32 is not installed")
    return _load(shim, openblas)


def shim_path() -> Path:
    """The built C library: RUVMLX_BLAS_SHIM, or ruvmlx/_lib in any folder of the installed package."""
    override = os.environ.get(SHIM_ENV)
    if override:
        return Path(override)
    name = Path("_lib") / "librvm_blas.so"
    roots = [Path(p) for p in sys.modules["ruvmlx"].__path__]
    return next((root / name for root in roots if (root / name).is_file()), roots[0] / name)


def openblas_path() -> Path | None:
    """libscipy_openblas.so of the installed package, found without running the package's code."""
    spec = importlib.util.find_spec("scipy_openblas32")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for f in folders for path in sorted(Path(f).glob("lib/libscipy_openblas*.so"))), None)


def _load(path: Path, openblas: Path) -> Blas:
    """Initialise the shim privately; make its symbols global only when that succeeds."""
    try:
        shim = ctypes.CDLL(str(path))
        shim.rvm_blas_config.restype = ctypes.c_char_p
        shim.rvm_blas_calls.restype = ctypes.c_long
        status = shim.rvm_blas_init(os.fsencode(openblas))
    except (OSError, AttributeError) as error:
        return Blas("reference", f"cannot load {path}: {error}")
    if status != 0:
        return Blas("reference", f"{openblas} is not the OpenBLAS that was expected (status {status})")
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    fixed = "OPENBLAS_NUM_THREADS" in os.environ
    if not fixed:
        shim.rvm_blas_set_threads(cpu.physical_cores())
    return Blas(*_names(shim.rvm_blas_config().decode()), shim, shim.rvm_blas_get_threads(), fixed)


def _names(config: str) -> tuple[str, str]:
    """OpenBLAS's own description -> (name with version, kernel set):
    "OpenBLAS 0.3.34.481.3 DYNAMIC_ARCH NO_AFFINITY SkylakeX MAX_THREADS=64"."""
    words = config.split()
    version = ".".join(words[1].split(".")[:3])
    kernels = next((w for w in reversed(words) if "=" not in w), "")
    return f"openblas {version}", kernels
