"""This module measures the energy of a decoded token. The module reads the energy counters of the processor
packages on Linux (RAPL), if the user has the permission to read them.

macOS shows the power only to administrators (powermetrics). On macOS and in most virtual machines, the
report's row has no value, and the row's note says why.
"""

import time
from collections.abc import Callable
from pathlib import Path

from ruvmlx.platform.sensors import SYS, packages

from .rows import Row, left_out, median_row

COUNTERS = SYS / "class/powercap"
NAME = "energy of a decoded token"


def row(decode: Callable[[], int], turns: int, folder: Path = COUNTERS) -> Row:
    """Measure the energy of a decoded token in `turns` turns, and return the row. The counters include the
    energy of all other programs that run at the same time.

    decode: a function that decodes some tokens and returns their number
    folder: the folder of the energy counters
    """
    readable = packages(folder)
    if not readable:
        return left_out(NAME, "J", "no energy counter that this user may read")
    samples = []
    for _ in range(turns):
        before, started = [c.read() for c in readable], time.perf_counter()
        tokens = decode()
        spent = sum(c.since(b) for c, b in zip(readable, before, strict=True) if b is not None)
        samples.append(spent / tokens)
        seconds = time.perf_counter() - started
    note = f"{len(readable)} package{'s' * (len(readable) > 1)}, {spent / seconds:.0f} W, by all programs"
    return median_row(NAME, samples, "J", better="lower", note=note)
