"""Memory that this process uses, and memory that it may use."""

import ctypes
import os
import resource
import sys
from dataclasses import dataclass

_STATUS = "/proc/self/status"
_FOOTPRINT = 72  # offset of ri_phys_footprint in struct rusage_info_v0 (macOS, <sys/resource.h>)


@dataclass(frozen=True)
class MemoryUse:
    """In bytes. model: weights and working memory of the backend; kv: caches of the chats in memory;
    adapters: loaded adapters with their statistics.

    resident: the whole process, now; peak: its maximum since the start. budget: RAM that the process may use,
    a container's limit if there is one; kv_budget: limit of the KV caches, 0: none.
    """

    model: int
    kv: int
    adapters: int
    resident: int
    peak: int
    budget: int
    kv_budget: int = 0

    @property
    def rest(self) -> int:
        """Everything else: Python, libraries, the screen."""
        return max(0, self.resident - self.model - self.kv - self.adapters)


def resident() -> int:
    """Bytes of memory that the process uses now. On macOS the footprint that Activity Monitor shows, which
    includes GPU buffers."""
    return _darwin_footprint() if sys.platform == "darwin" else _status("VmRSS")


def peak() -> int:
    """Maximum of `resident` since the process started."""
    return _status("VmHWM") if sys.platform != "darwin" else max(_maxrss(), _darwin_footprint())


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes. Not getrusage: its peak includes the program before exec."""
    try:
        with open(_STATUS, encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))
    except (OSError, StopIteration):
        return _maxrss()


def _maxrss() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _darwin_footprint() -> int:
    try:
        info = (ctypes.c_uint8 * 512)()
        failed = ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, info)
        found = int.from_bytes(bytes(info[_FOOTPRINT : _FOOTPRINT + 8]), "little")
    except (OSError, AttributeError):
        return _maxrss()
    return found if found and not failed else _maxrss()
