"""CPU cores and memory that this process may use."""

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

SPARE = 0.95  # share of the free memory that a model may take
GPU_SHARE = 0.75  # share of unified memory that Metal gives one process, about


def usable_cpus() -> set[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Physical cores that this process may use, within a container's CPU quota."""
    cores = {_siblings(cpu) for cpu in usable_cpus()}
    return max(1, min(len(cores), _quota()))


def total_memory() -> int:
    """Bytes of RAM; a container's limit where it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory() -> int:
    """Bytes that this process can still allocate, swap included; total memory if the system does not tell."""
    total = total_memory()
    if sys.platform == "darwin":
        return total * _darwin_level() // 100
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    free = [int(fields[n].split()[0]) << 10 for n in ("MemAvailable", "SwapFree") if n in fields]
    return min(sum(free) or total, _cgroup_room(total))


def has_metal() -> bool:
    """Is this a Mac whose GPU shares the CPU's memory?"""
    return sys.platform == "darwin" and os.uname().machine == "arm64"


def memory_limit(metal: bool) -> int:
    """Bytes that one model may take. macOS frees memory itself, up to the GPU's share; other systems kill a
    process that takes too much."""
    return int(total_memory() * GPU_SHARE) if metal else int(available_memory() * SPARE)


def _cgroup_room(total: int) -> int:
    """Bytes left below the container's limit; its file cache counts as free."""
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if not (limit.isdigit() and used.isdigit()):
        return total
    stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    return int(limit) - int(used) + int(stat.get("inactive_file", 0))


def _darwin_level() -> int:
    """kern.memorystatus_level: percent of memory that is available."""
    level, size = ctypes.c_int(100), ctypes.c_size_t(4)
    ctypes.CDLL(None).sysctlbyname(
        b"kern.memorystatus_level", ctypes.byref(level), ctypes.byref(size), None, 0
    )
    return level.value


BusySample = tuple[float, float, float]  # seconds: wall, busy time of all CPUs, CPU time of this process


def busy_sample() -> BusySample:
    return time.monotonic(), _busy_seconds(), time.process_time()


class OtherLoad:
    """Cores kept busy by other processes: the machine's busy time less our own, since the last measurement.

    Linux only (/proc/stat); 0 elsewhere. A measurement is reused for PERIOD seconds, because the kernel
    counts in steps of 10 ms.
    """

    PERIOD = 0.25

    def __init__(self, sample: Callable[[], BusySample] = busy_sample):
        self._sample = sample
        self._at, self._cores = sample(), 0.0

    def cores(self) -> float:
        if time.monotonic() - self._at[0] >= self.PERIOD:
            now = self._sample()
            wall, busy, own = (b - a for a, b in zip(self._at, now, strict=True))
            self._at, self._cores = now, max(0.0, (busy - own) / wall)
        return self._cores


def _busy_seconds() -> float:
    """First line of /proc/stat: cpu user nice system idle iowait irq softirq steal ..., in clock ticks."""
    fields = _read("/proc/stat").partition("\n")[0].split()[1:9]
    if len(fields) < 8:
        return time.process_time()
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _siblings(cpu: int) -> str:
    """An identifier that the hyper-threads of one core share."""
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
