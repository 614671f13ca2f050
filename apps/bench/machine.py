"""This module describes the machine of a report: its hardware, the limits of its speed, and how much it
slowed down during the measurements."""

import contextlib
import functools
import mmap
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.kernels import matmul, micro
from ruvmlx.platform.cpu import physical_cores, total_memory

# bytes; the size of a block of memory that is larger than the caches of nearly all processors
BLOCK = 256 << 20
DRIFT = 0.05  # if a machine slows down by more than this share, the report calls it throttled
_PACKAGES = ("ruvmlx", "mlx", "mlx-lm", "numpy", "llama-cpp-python")


def facts(threads: int) -> dict[str, Any]:
    """Return facts about the machine and the software on which a report's figures depend. No fact names a
    person, a host or a path. threads: the number of threads in the measurements."""
    return hardware(threads) | {"matmul": matmul.implementations()[0]}


def hardware(threads: int) -> dict[str, Any]:
    """Return facts about the machine and its software. The function does not need ruvmlx's C library."""
    return {
        "chip": _chip(),
        "cpu": platform.machine(),
        "cores": physical_cores(),
        "threads": threads,
        "memory": total_memory(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "power": _power(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _chip() -> str:
    if sys.platform == "darwin":
        return output("sysctl", "-n", "machdep.cpu.brand_string")
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()


def _power() -> str:
    """Return the source of the machine's power: "mains", "battery" or "unknown"."""
    if sys.platform == "darwin":
        said = output("pmset", "-g", "batt")
        return "battery" if "Battery Power" in said else "mains" if "AC Power" in said else "unknown"
    online = [_text(p) for p in sorted(Path("/sys/class/power_supply").glob("*/online"))]
    return "unknown" if not online else "mains" if "1" in online else "battery"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Limits:
    """The limits of the machine's speed.

    memory: the bytes a second that all threads together read from main memory
    products, products_1: the products of two small integers a second (matmul.peak), on all threads and on one
        thread
    """

    memory: float
    products: float
    products_1: float

    def or_more(self, other: "Limits") -> "Limits":
        """Return the larger value of each limit of both objects, because the machine can reach a speed that
        it reached once."""
        return Limits(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def limits(threads: int) -> Limits:
    """Measure the machine's limits. Each limit is the best of several measurements, because other programs
    can only lower a measured speed."""
    parts = [filled_block(BLOCK // threads) for _ in range(threads)]
    nbytes = sum(part.nbytes for part in parts)
    with ThreadPoolExecutor(threads) as pool:
        return Limits(
            memory=nbytes / min(_best(functools.partial(_each, pool, read, parts)) for read in READS),
            products=_products(lambda: sum(pool.map(matmul.peak, [_ROUNDS] * threads))),
            products_1=_products(lambda: matmul.peak(_ROUNDS)),
        )


@functools.cache
def reading(nbytes: int) -> float:
    """Return the seconds in which one thread reads the same `nbytes` bytes again: from the caches if the
    bytes fit into them, else from main memory."""
    block = filled_block(max(8, nbytes))
    return min(_best(functools.partial(read, block), 5 if nbytes > 1 << 24 else 100) for read in READS)


def _each(
    pool: ThreadPoolExecutor, read: Callable[[np.ndarray], object], parts: Sequence[np.ndarray]
) -> None:
    list(pool.map(read, parts))


def _bits(block: np.ndarray) -> np.uint64:
    return np.bitwise_or.reduce(block.view(np.uint64))


# Functions that read all bytes of a block. It depends on the processor which function is the fastest.
READS: tuple[Callable[[np.ndarray], object], ...] = (micro.all_finite, _bits, np.max)


def fastest(parts: Sequence[np.ndarray], pool: ThreadPoolExecutor) -> Callable[[np.ndarray], object]:
    """Return the function of READS that reads these parts fastest, if each thread reads one part."""
    return min(READS, key=lambda read: _best(functools.partial(_each, pool, read, parts), 3))


def filled_block(nbytes: int) -> np.ndarray:
    """Return an array of nbytes / 4 ones (float32), in large memory pages if the system supports them. A
    model's weights use large memory pages, too. The processor reads small memory pages more slowly."""
    nbytes = nbytes // 8 * 8
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # some Linux kernels do not support large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(memory, np.float32)
    block[:] = 1
    return block


_ROUNDS = 100_000


def _products(run: Callable[[], int]) -> float:
    return run() / _best(run)


def _best(run: Callable[[], object], times: int = 7) -> float:
    run()
    return min(_seconds(run) for _ in range(times))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@dataclass
class Thermometer:
    """An object that times the same small piece of work several times during a run. A hot or busy machine
    does this work more slowly. The work is arithmetic, because the speed of arithmetic follows the
    processor's clock rate."""

    readings: list[float] = field(default_factory=list)

    def read(self) -> None:
        self.readings.append(statistics.median(_seconds(lambda: matmul.peak(_ROUNDS // 4)) for _ in range(9)))

    @property
    def drift(self) -> float:
        """The slowdown of the machine during the run: (the median of the readings after the first one) / (the
        first reading) - 1. The drift is 0 with fewer than 2 readings, or if the machine did not slow down."""
        if len(self.readings) < 2:
            return 0.0
        first, *rest = self.readings
        return max(0.0, statistics.median(rest) / first - 1)

    @property
    def is_throttled(self) -> bool:
        return self.drift > DRIFT


def environment() -> dict[str, str]:
    """Return the environment variables RUVMLX_* except RUVMLX_HOME, because they can change the results."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("RUVMLX_") and k != "RUVMLX_HOME"}
