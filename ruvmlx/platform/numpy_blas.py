"""This module sets the number of threads of NumPy's matrix products. NumPy's wheels for Linux bring an
OpenBLAS of their own; on macOS, Accelerate chooses the number itself, and the module does nothing."""

import ctypes
import functools
import os
from pathlib import Path

import numpy as np

from . import cpu


class NumpyThreads:
    """The number of threads of NumPy's matrix products. threads: the largest number."""

    def __init__(self, threads: int | None = None):
        """threads: the number that the user chose; None: the number of physical cores, less those that other
        processes keep busy, or the number in the variable OPENBLAS_NUM_THREADS"""
        fixed = os.environ.get("OPENBLAS_NUM_THREADS", "") if threads is None else ""
        self._is_free = threads is None and not fixed.isdigit()
        self.threads = threads or (int(fixed) if fixed.isdigit() else 0) or cpu.physical_cores()
        self._load = cpu.OtherLoad()

    def adapt(self) -> int:
        """Set the number of threads and return it. OpenBLAS's threads wait for each other in busy loops, so
        a thread without a free core makes all of them slower (blas.py)."""
        count = self.threads
        if self._is_free:
            count = max(1, min(count, round((os.cpu_count() or 1) - self._load.cores())))
        if (library := _openblas()) is not None:
            library.scipy_openblas_set_num_threads64_(count)
        return count


@functools.cache
def _openblas() -> ctypes.CDLL | None:
    """Return NumPy's OpenBLAS; None if NumPy has another library for matrix products."""
    for path in sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*")):
        try:
            library = ctypes.CDLL(str(path))
            library.scipy_openblas_set_num_threads64_.restype = None
            return library
        except (OSError, AttributeError):
            continue
    return None


def used_threads() -> int | None:
    """Return the present number of threads; None if it is not known."""
    library = _openblas()
    return None if library is None else int(library.scipy_openblas_get_num_threads64_())
