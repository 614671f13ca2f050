"""What this machine offers a process: cores that are really ours, memory."""

import math
import os
from pathlib import Path


def usable_cpus() -> set[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Cores this process may use: hyper-threads counted once, a container's CPU quota respected."""
    cores = {_siblings(cpu) for cpu in usable_cpus()}
    return max(1, min(len(cores), _quota()))


def total_memory() -> int:
    """Bytes of RAM; a container's limit where it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _siblings(cpu: int) -> str:
    """A name that the hyper-threads of one core share."""
    return _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _quota() -> int:
    """CPUs that the cgroup allows, rounded up: cpu.max holds "<quota> <period>" or "max <period>" in us."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else 1 << 16


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
