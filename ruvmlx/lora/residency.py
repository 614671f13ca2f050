"""Which adapters stay in memory: hot (in use), warm (loaded, ready to be used at once), cold (on disk)."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
BUDGET = 256 << 20  # bytes


@dataclass(frozen=True)
class Resident:
    """One adapter as it stands. tier: "hot" | "warm" | "cold"; bytes: in memory, 0 when cold."""

    name: str
    tier: str
    accesses: int
    loads: int
    bytes: int


class Residency(Generic[T]):
    """Loaded adapters by name, within a budget of bytes: the ones not used for longest leave first.

    The hot one stays, whatever its size. Sizes are asked again at every change: what is loaded may grow.
    """

    def __init__(self, load: Callable[[str], T], size: Callable[[T], int], budget: int = BUDGET):
        self._load, self._size, self.budget = load, size, budget
        self._loaded: OrderedDict[str, T] = OrderedDict()  # the hot one last
        self._counts: dict[str, list[int]] = {}  # accesses, loads

    def get(self, name: str) -> T:
        """The adapter, loaded if need be; it is the hot one now. If loading fails, nothing changes."""
        found = self._loaded.pop(name) if name in self._loaded else None
        counts = self._counts.get(name, [0, 0])
        if found is None:
            found, counts = self._load(name), [counts[0], counts[1] + 1]
        self._counts[name] = [counts[0] + 1, counts[1]]
        self._loaded[name] = found
        self._evict()
        return found

    def _evict(self) -> None:
        sizes = {name: self._size(adapter) for name, adapter in self._loaded.items()}
        while len(sizes) > 1 and sum(sizes.values()) > self.budget:
            coldest = next(iter(self._loaded))
            del self._loaded[coldest], sizes[coldest]

    def loaded(self) -> list[T]:
        """Those in memory, the one used last at the end."""
        return list(self._loaded.values())

    def forget(self, name: str) -> None:
        """It was deleted, or must be read again."""
        self._loaded.pop(name, None)
        self._counts.pop(name, None)

    def tiers(self) -> list[Resident]:
        """Every adapter that was ever asked for, the hot one first."""
        hot = next(reversed(self._loaded), None)
        order = [*reversed(self._loaded), *(name for name in self._counts if name not in self._loaded)]
        return [self._resident(name, hot) for name in order]

    def _resident(self, name: str, hot: str | None) -> Resident:
        adapter, (accesses, loads) = self._loaded.get(name), self._counts[name]
        if adapter is None:
            return Resident(name, "cold", accesses, loads, 0)
        return Resident(name, "hot" if name == hot else "warm", accesses, loads, self._size(adapter))
