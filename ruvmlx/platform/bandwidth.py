"""How fast this machine reads memory, which bounds how fast a model writes."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from .cpu import physical_cores

_BYTES = 64 << 20  # that each thread copies: more than caches hold
_ROUNDS = 3


@cache
def memory_bandwidth() -> float:
    """Bytes per second that all cores read and write together, the best of a few rounds: a tenth of a second.
    By the time that each core works on it, so other programs hardly change it. On Apple Silicon the GPU reads
    at least as fast."""
    cores = physical_cores()
    buffers = [(np.ones(_BYTES, np.uint8), np.empty(_BYTES, np.uint8)) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        return max(sum(pool.map(_rate, buffers)) for _ in range(_ROUNDS))


def _rate(pair: tuple[np.ndarray, np.ndarray]) -> float:
    source, target = pair
    started = time.thread_time()
    np.copyto(target, source)
    return (source.nbytes + target.nbytes) / max(time.thread_time() - started, 1e-6)
