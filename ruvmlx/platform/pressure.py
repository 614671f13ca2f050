"""This module measures the memory pressure: the share of the machine's memory that is in use."""

import ctypes
import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# {value of macOS's kern.memorystatus_vm_pressure_level (1 normal, 2 warning, 4 critical): the memory pressure
# that `memory_pressure` returns}
_DARWIN_LEVELS = {1: 0.0, 2: 0.85, 4: 0.95}


def memory_pressure() -> float:
    """Return the memory pressure from 0 (all memory is free) to 1 (no memory is free); on macOS, only one of
    the values in _DARWIN_LEVELS. Return 0 if the operating system does not report the memory pressure."""
    if sys.platform == "darwin":
        return _darwin()
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available, total = (int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError, IndexError):
        return 0.0
    return 1 - available / total if total else 0.0


def _darwin() -> float:
    level, size = ctypes.c_int(0), ctypes.c_size_t(4)
    name = b"kern.memorystatus_vm_pressure_level"
    failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
    return 0.0 if failed else _DARWIN_LEVELS.get(level.value, 0.0)
