"""What this process holds in memory, and what it may hold."""

import ctypes
import os
import resource
import sys
from dataclasses import dataclass

_STATUS = "/proc/self/status"
_FOOTPRINT = 72  # offset of ri_phys_footprint in struct rusage_info_v0 (macOS, <sys/resource.h>)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. model: weights and working memory of the backend; kv: caches of the chats that are in memory;
    adapters: those that are loaded, with what is known of them.

    resident: the process as a whole, now; peak: at most since its start. budget: RAM that it may use, a
    container's limit where there is one; kv_budget: what the caches should stay within, 0 for no bound.
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
        """Python, libraries, the screen."""
        return max(0, self.resident - self.model - self.kv - self.adapters)


def resident() -> int:
    """Bytes that the process holds now. On macOS what Activity Monitor counts, a GPU's buffers too."""
    return _darwin_footprint() if sys.platform == "darwin" else _status("VmRSS")


def peak() -> int:
    """Bytes that it held at most."""
    return _status("VmHWM") if sys.platform != "darwin" else max(_maxrss(), _darwin_footprint())


def size(count: float) -> str:
    """Bytes as people read them: "512 KiB", "1.2 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _status(field: str) -> int:
    """getrusage would count what the program was before it became this one."""
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
