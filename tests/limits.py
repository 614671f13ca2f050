"""The memory of a process: its limit, and the most that it has held."""

import contextlib
import resource
import sys


def limit_memory(nbytes: int) -> None:
    """Bound this process's address space, where the system can: macOS refuses RLIMIT_AS (EINVAL)."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def peak_memory() -> int:
    """Bytes that this process has held at most. getrusage counts bytes on macOS, kilobytes on Linux."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
