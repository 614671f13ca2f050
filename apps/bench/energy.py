"""Energy, where the platform tells it without asking for rights: the package counters of Linux (RAPL).

macOS gives power only to its administrator (powermetrics): there, and in virtual machines, the row says why
it is empty."""

import time
from collections.abc import Callable
from pathlib import Path

from .rows import Row, left_out, measured

COUNTERS = "/sys/class/powercap"
NAME = "energy of a decoded token"


def row(decode: Callable[[], int], turns: int, folder: str = COUNTERS) -> Row:
    """decode: does some work and says how many tokens that were. Whatever else runs is counted, too."""
    counters = [Counter(path) for path in sorted(Path(folder).glob("*:*")) if path.name.count(":") == 1]
    readable = [counter for counter in counters if counter.read() is not None]
    if not readable:
        return left_out(NAME, "J", "no energy counter that this user may read")
    samples = []
    for _ in range(turns):
        before, started = [c.read() for c in readable], time.perf_counter()
        tokens = decode()
        spent = sum(c.since(b) for c, b in zip(readable, before, strict=True) if b is not None)
        samples.append(spent / tokens)
        seconds = time.perf_counter() - started
    note = f"{len(readable)} package{'s' * (len(readable) > 1)}, {spent / seconds:.0f} W; the whole machine's"
    return measured(NAME, samples, "J", better="lower", note=note)


class Counter:
    """energy_uj of one package; it starts again at 0 after max_energy_range_uj."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> int | None:
        """Microjoules."""
        return self._number("energy_uj")

    def since(self, before: int) -> float:
        """Joules."""
        now, around = self.read(), self._number("max_energy_range_uj")
        if now is None:
            return 0.0
        return ((now - before) if now >= before else (now - before + (around or 0))) / 1e6

    def _number(self, name: str) -> int | None:
        try:
            return int((self._path / name).read_text())
        except (OSError, ValueError):
            return None
