"""This module measures the memory that this process uses, and gives freed memory back to the system."""

import ctypes
import os
import resource
import sys
from dataclasses import dataclass

_STATUS = "/proc/self/status"
# In bytes. glibc gives each larger block its own mapping, so that `free` returns the memory of the block.
# With 64 kB, the tables of the taste model split the heap: a table that grew with the ratings left a hole
# that was too small for the next table (docs/benchmarks.md).
_OWN_MAPPING = 16384
# In bytes. When glibc makes its heap larger or smaller, it leaves this free memory at the end.
_END_OF_HEAP = 4096
# The maximum number of such mappings. Linux allows a process 65,530 mappings of all kinds.
_MAPPINGS = 8192
# The maximum number of glibc arenas. By default, glibc makes up to eight arenas for each core, and each arena
# keeps its own freed memory.
_ARENAS = 2
# of glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
_FOOTPRINT = 72  # the byte offset of ri_phys_footprint in struct rusage_info_v0 (macOS, <sys/resource.h>)


@dataclass(frozen=True)
class MemoryUse:
    """The memory of this process in bytes. model: the weights and the working memory of the backend. kv: the
    KV caches in memory. adapters: the loaded adapters with their statistics.

    resident: the memory of the whole process now. peak: the maximum of `resident` since the start. budget:
    the RAM, or the container's limit if it is lower. kv_budget: the limit of the KV caches; 0 for no limit.
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
        """Return the bytes of `resident` that are not model, kv or adapters: Python, libraries, the user
        interface and so on."""
        return max(0, self.resident - self.model - self.kv - self.adapters)


def resident() -> int:
    """Return the bytes of memory that the process uses now. On macOS the result is the footprint that
    Activity Monitor shows, which includes GPU buffers."""
    return _darwin_footprint() if sys.platform == "darwin" else _status("VmRSS")


def peak() -> int:
    """Return the maximum of `resident` since the process started. On macOS the result is the maximum resident
    set size, or the present footprint if it is larger."""
    return _status("VmHWM") if sys.platform != "darwin" else max(_maxrss(), _darwin_footprint())


def darwin_footprint(process: int) -> int:
    """Return the footprint in bytes of a process of this user on macOS. Return 0 if the process has ended, or
    if the system does not tell the footprint. process: the process id"""
    info = (ctypes.c_uint8 * 512)()
    try:
        failed = ctypes.CDLL(None).proc_pid_rusage(process, 0, info)
    except (OSError, AttributeError):
        return 0
    return 0 if failed else int.from_bytes(bytes(info[_FOOTPRINT : _FOOTPRINT + 8]), "little")


def give_back() -> None:
    """Return the freed memory of this process to the operating system. The allocator of glibc can keep freed
    memory if a block in use has a higher address. With other allocators, the function does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_unused_memory() -> None:
    """Limit the freed memory that the glibc allocator keeps. Without this limit, a program that runs for days
    keeps as much memory as it used at its peak. With other allocators, the function does nothing."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and sys.platform == "linux":
        set_option(_M_MMAP_THRESHOLD, _OWN_MAPPING)
        set_option(_M_TRIM_THRESHOLD, _OWN_MAPPING)
        set_option(_M_TOP_PAD, _END_OF_HEAP)
        set_option(_M_MMAP_MAX, _MAPPINGS)
        set_option(_M_ARENA_MAX, _ARENAS)


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes. The function does not call getrusage, because getrusage
    also counts the peak of the program that ran in this process before `exec`."""
    try:
        with open(_STATUS, encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))
    except (OSError, StopIteration):
        return _maxrss()


def _maxrss() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _darwin_footprint() -> int:
    return darwin_footprint(os.getpid()) or _maxrss()
