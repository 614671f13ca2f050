"""This module makes MLX use a fast BLAS (a library for matrix products) on Linux. The fast BLAS comes from
pip packages and needs no other installation.

MLX's Linux wheel calls a reference BLAS: 4-8 GFLOP/s on two cores. `preload` loads a small C library, the
shim (neon/src/blas_shim.c), into the global symbol scope before the first import of MLX. libmlx.so then binds
`cblas_sgemm` to the shim. The shim calls OpenBLAS from the PyPI package scipy-openblas32: 250-430 GFLOP/s on
the same cores (512 x 512 x 512, float32; issue 2). macOS has the fast library Accelerate and needs no shim.

Only `ruvmlx.platform.mx` calls `preload`; the other modules import MLX from `ruvmlx.platform.mx` (only a
benchmark of mlx-lm imports MLX itself).
"""

import ctypes
import functools
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from . import cpu

# the environment variable with another path of the C library (the shim); "off" keeps the reference BLAS
SHIM_ENV = "RUVMLX_BLAS_SHIM"


@dataclass
class Blas:
    """A Blas describes the library that computes MLX's matrix products on the CPU."""

    name: str  # "openblas 0.3.34", "accelerate", "reference"
    detail: str = ""  # the kernels that OpenBLAS chose, or the reason why MLX does not use OpenBLAS
    shim: ctypes.CDLL | None = None
    most: int = 1  # the number of threads that BLAS uses if no other process is busy
    fixed: bool = False  # True if the user set the number of threads, so that it stays the same

    @property
    def fast(self) -> bool:
        return self.name != "reference"

    def calls(self) -> int:
        """Return the number of matrix products that the shim has passed on since the start of the process."""
        return self.shim.rvm_blas_calls() if self.shim else 0

    def threads(self) -> int:
        return self.shim.rvm_blas_get_threads() if self.shim else 0

    def set_threads(self, n: int) -> None:
        """Use n threads from now on, even if other processes keep cores busy."""
        self.fixed = True
        if self.shim:
            self.shim.rvm_blas_set_threads(n)

    def adapt(self, others: float) -> None:
        """Use fewer threads while other processes keep `others` cores busy.

        OpenBLAS's threads wait for each other in busy loops. On two cores with three other busy processes,
        the starter model decodes 0.9 tokens/s with two threads and 14 with one thread; on idle cores 57 and
        43.
        """
        if self.shim and not self.fixed:
            n = max(1, min(self.most, round((os.cpu_count() or 1) - others)))
            if n != self.threads():
                self.shim.rvm_blas_set_threads(n)


@functools.cache
def preload() -> Blas:
    """Load the fast BLAS once per process; on macOS, return Accelerate. If the fast BLAS cannot be used, for
    example because mlx.core was imported before and already uses its own BLAS, return the reference BLAS,
    with the reason in `detail`."""
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
    """Return the path of the shim: the path in the variable RUVMLX_BLAS_SHIM, or the file in ruvmlx/_lib of
    the installed package."""
    override = os.environ.get(SHIM_ENV)
    if override:
        return Path(override)
    name = Path("_lib") / "librvm_blas.so"
    roots = [Path(p) for p in sys.modules["ruvmlx"].__path__]
    return next((root / name for root in roots if (root / name).is_file()), roots[0] / name)


def openblas_path() -> Path | None:
    """Return the path of libscipy_openblas.so, or None if the package scipy-openblas32 is not installed. The
    search does not run the package's code."""
    spec = importlib.util.find_spec("scipy_openblas32")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for f in folders for path in sorted(Path(f).glob("lib/libscipy_openblas*.so"))), None)


def _load(path: Path, openblas: Path) -> Blas:
    """Load and initialise the shim. The shim's symbols become global only if the initialisation succeeds."""
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
    """Return (name with version, kernel set) from OpenBLAS's description of itself, for example
    "OpenBLAS 0.3.34.481.3 DYNAMIC_ARCH NO_AFFINITY SkylakeX MAX_THREADS=64"."""
    words = config.split()
    version = ".".join(words[1].split(".")[:3])
    kernels = next((w for w in reversed(words) if "=" not in w), "")
    return f"openblas {version}", kernels
