"""This module keeps adapters in memory within a budget. An adapter is hot (in use), warm (loaded, but not in
use) or cold (only on disk)."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
BUDGET = 256 << 20  # the maximum number of bytes of loaded adapters


@dataclass(frozen=True)
class Resident:
    """The state of one adapter: whether it is in memory, and how often it was used.

    tier: "hot" (in use), "warm" (loaded, but not in use) or "cold" (only on disk)
    accesses, loads: how often the adapter was requested, and how often it was loaded from disk
    bytes: the adapter's number of bytes in memory; 0 for a cold adapter
    """

    name: str
    tier: str
    accesses: int
    loads: int
    bytes: int


class Residency(Generic[T]):
    """The adapters in memory by name, within a budget in bytes. If the budget is exceeded, the least recently
    used adapters are evicted first; `get` never evicts the adapter that it returns. The sizes of adapters are
    read at every request, because a loaded adapter can grow.

    load: a function that loads the adapter of a name; size: a function that returns an adapter's bytes
    save: a function that stores what only the memory has of an adapter, before the adapter is evicted
    """

    def __init__(
        self, load: Callable[[str], T], size: Callable[[T], int], budget: int = BUDGET,
        save: Callable[[T], None] = lambda adapter: None,
    ):  # fmt: skip
        self._load, self._size, self.budget, self._save = load, size, budget, save
        # the adapters in memory by name; the hot adapter is the last
        self._loaded: OrderedDict[str, T] = OrderedDict()
        self._counts: dict[str, list[int]] = {}  # [accesses, loads] of each adapter

    def get(self, name: str) -> T:
        """Make an adapter the hot adapter, and return it. Load the adapter if it is cold. If the load fails,
        the hot adapter stays the same."""
        found = self._loaded.pop(name) if name in self._loaded else None
        counts = self._counts.get(name, [0, 0])
        if found is None:
            found, counts = self._load(name), [counts[0], counts[1] + 1]
        self._counts[name] = [counts[0] + 1, counts[1]]
        self._loaded[name] = found
        self._evict()
        return found

    def load_beside(self, name: str) -> T:
        """Return an adapter for a use beside the hot adapter. The hot adapter stays hot if both adapters fit
        into the budget. Load the adapter if it is cold."""
        hot = next(reversed(self._loaded), None)
        found = self.get(name)
        if hot is not None and hot in self._loaded:
            self._loaded.move_to_end(hot)
        return found

    def _evict(self) -> None:
        sizes = {name: self._size(adapter) for name, adapter in self._loaded.items()}
        while len(sizes) > 1 and sum(sizes.values()) > self.budget:
            coldest = next(iter(self._loaded))
            self._save(self._loaded[coldest])
            del self._loaded[coldest], sizes[coldest]

    def loaded_adapters(self) -> list[T]:
        """Return the adapters in memory, the least recently used first and the hot adapter last."""
        return list(self._loaded.values())

    def forget(self, name: str) -> None:
        """Remove an adapter from memory, because it was deleted or must be loaded again."""
        self._loaded.pop(name, None)
        self._counts.pop(name, None)

    def tiers(self) -> list[Resident]:
        """Return the state of every adapter that was requested and not forgotten since, the hot adapter
        first."""
        hot = next(reversed(self._loaded), None)
        order = [*reversed(self._loaded), *(name for name in self._counts if name not in self._loaded)]
        return [self._resident(name, hot) for name in order]

    def _resident(self, name: str, hot: str | None) -> Resident:
        adapter, (accesses, loads) = self._loaded.get(name), self._counts[name]
        if adapter is None:
            return Resident(name, "cold", accesses, loads, 0)
        return Resident(name, "hot" if name == hot else "warm", accesses, loads, self._size(adapter))
