"""The protocol for page memory, which each backend implements.

A page holds 64 tokens of all layers and KV heads. Only the storage that made a page knows what its number
means.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Bytes = np.ndarray  # uint8, contiguous


class PageTable(Protocol):
    """The pages of one sequence in the form that the backend's attention reads."""

    def set(self, index: int, page: int, tier: int) -> None: ...

    def clear(self, index: int) -> None:
        """The page is gone: trimmed, or dropped behind the sliding window."""

    def share(self, other: Any) -> None:
        """`other` is the table of a fork: give it the tokens that are not in pages yet."""

    def flush(self) -> None:
        """Write appended tokens into their pages; called before pages are dumped or written in another
        way."""

    @property
    def nbytes(self) -> int: ...


class Storage(Protocol):
    layout: str  # name of the byte order that `dump` uses
    background: bool  # demotions run in parallel to decoding: worth starting ahead of time

    limit: int  # bytes that all pages should take, unused ones included; 0 for no limit

    def page_bytes(self, tier: int) -> int:
        """Bytes of a page with its scales and biases."""

    def is_crowded(self, tier: int, n: int) -> bool:
        """Do n more pages of a tier exceed the limit because of unused pages, which `compact` returns?"""

    def prepare(self, tier: int, n: int) -> None:
        """Called before n pages of a tier are made."""

    def make(self, tier: int) -> int:
        """The number of a new page with undefined contents."""

    def compact(self, tier: int) -> dict[int, int]:
        """Return unused memory of a tier to the system. Gives the new page numbers by the old ones: for all
        pages of the tier, or for none."""

    def free(self, page: int, tier: int) -> None: ...

    def copy(self, page: int) -> int:
        """A second hot page with the same contents."""

    def demote(self, pages: Sequence[int], tier: int) -> Callable[[], Sequence[int]]:
        """Start converting full pages of `tier` to the next lower tier. Returns a function to call once: it
        waits and gives the new pages' numbers. The old pages must not change before that."""

    def dump(self, page: int, tier: int) -> Bytes:
        """The bytes of a page; write them out before the page changes."""

    def load(self, data: bytes, tier: int) -> int:
        """A new page from the bytes that `dump` gave."""

    def new_table(self) -> Any:
        """A PageTable (Any: the backend reads more of its own table than the protocol says)."""
