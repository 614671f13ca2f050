"""This module finds the CPU cores and the memory that this process can use."""

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

SPARE = 0.95  # the share of the free memory that one model can use
# Models can take GPU_SHARE of the RAM. If a Mac has less than LARGE_MAC bytes of RAM, they can take
# SMALL_MAC_SHARE. Metal recommends these shares (recommendedMaxWorkingSetSize: 10.7 of 16 GiB, 27 of 36).
GPU_SHARE, SMALL_MAC_SHARE, LARGE_MAC = 3 / 4, 2 / 3, 36 << 30


def usable_cpus() -> set[int]:
    """Return the numbers of the CPUs on which the system can run this process."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Return the number of physical cores that this process can use, at most the container's CPU quota."""
    cores = {_siblings(cpu) for cpu in usable_cpus()}
    return max(1, min(len(cores), _quota()))


def total_memory() -> int:
    """Return the bytes of RAM, or the container's memory limit if the limit is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory() -> int:
    """Return the bytes that this process can still allocate, with swap. If the system does not report the
    free memory, return the total memory."""
    total = total_memory()
    if sys.platform == "darwin":
        # the percentage of memory that is available
        return total * _darwin_number(b"kern.memorystatus_level", 100) // 100
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    free = [int(fields[n].split()[0]) << 10 for n in ("MemAvailable", "SwapFree") if n in fields]
    return min(sum(free) or total, _cgroup_room(total))


def has_metal() -> bool:
    """Return True on a Mac with Apple Silicon, whose GPU and CPU share one memory."""
    return sys.platform == "darwin" and os.uname().machine == "arm64"


def memory_limit(metal: bool) -> int:
    """Return the number of bytes of memory that one model can use. On a Mac with Metal, the limit is the
    GPU's share of the RAM, because macOS can move other programs' memory to the disk. Other systems can kill
    a process that takes more memory than is free, so there the limit is a share of the free memory."""
    return memory_of_models(total_memory(), metal) if metal else int(available_memory() * SPARE)


def memory_of_models(total: int, metal: bool) -> int:
    """Return how many bytes of RAM the models can take. On a Mac, the user can set another limit for the GPU
    with `sysctl iogpu.wired_limit_mb`. The function then returns this limit.

    total: the size of the RAM in bytes
    metal: True if the GPU of a Mac runs the models
    """
    if metal and (lent := _darwin_number(b"iogpu.wired_limit_mb", 0) << 20):
        return min(lent, total)
    return int(total * (SMALL_MAC_SHARE if metal and total < LARGE_MAC else GPU_SHARE))


def _cgroup_room(total: int) -> int:
    """Return the bytes that the container can still allocate. The function treats the container's file cache
    as free memory, because the system can drop this cache."""
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if not (limit.isdigit() and used.isdigit()):
        return total
    stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    return int(limit) - int(used) + int(stat.get("inactive_file", 0))


def _darwin_number(name: bytes, otherwise: int) -> int:
    """Return a number of macOS's sysctl, of 4 or 8 bytes; `otherwise` if the system has no such number."""
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
    sysctl = getattr(ctypes.CDLL(None), "sysctlbyname", None)  # Linux does not have the function
    failed = sysctl is None or sysctl(name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return otherwise if failed else value.value


# One sample: seconds of clock time, busy seconds of all CPUs, seconds of CPU time of this process.
BusySample = tuple[float, float, float]


def busy_sample() -> BusySample:
    return time.monotonic(), _busy_seconds(), time.process_time()


class OtherLoad:
    """OtherLoad measures how many cores other processes keep busy: the busy time of all cores minus the CPU
    time of this process, both since the last measurement, divided by the clock time.

    The measurement works on Linux only (/proc/stat) and gives 0 on other systems. A result stays valid for
    PERIOD seconds, because the kernel counts in steps of 10 ms.
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
    """Return the busy seconds of all CPUs from the first line of /proc/stat: "cpu user nice system idle
    iowait irq softirq steal ...", in clock ticks. Without this file, return the CPU time of this process."""
    fields = _read("/proc/stat").partition("\n")[0].split()[1:9]
    if len(fields) < 8:
        return time.process_time()
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _siblings(cpu: int) -> str:
    """Return a text that is the same for all hyper-threads of one physical core."""
    return _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _quota() -> int:
    """Return the number of CPUs that the Linux cgroup allows, rounded up. The file cpu.max has the text
    "<quota> <period>" or "max <period>" in microseconds."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else 1 << 16


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
