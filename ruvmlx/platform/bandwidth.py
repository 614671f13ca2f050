"""This module measures the memory bandwidth, because the bandwidth limits the speed at which a model
writes."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from .cpu import physical_cores

# the number of bytes that each thread copies; this is more than the processor's caches hold
_BYTES = 64 << 20
_ROUNDS = 3


@cache
def memory_bandwidth() -> float:
    """Return the number of bytes per second that all cores together read and write. The result is the best of
    a few rounds.

    The measurement takes about a tenth of a second. The function divides the bytes that each thread copies by
    the thread's processor time, so other programs hardly change the result. On Apple Silicon, the GPU reads
    memory at least as fast as the cores."""
    cores = physical_cores()
    buffers = [(np.ones(_BYTES, np.uint8), np.empty(_BYTES, np.uint8)) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        return max(sum(pool.map(_rate, buffers)) for _ in range(_ROUNDS))


def _rate(pair: tuple[np.ndarray, np.ndarray]) -> float:
    source, target = pair
    started = time.thread_time()
    np.copyto(target, source)
    return (source.nbytes + target.nbytes) / max(time.thread_time() - started, 1e-6)
