"""What a backend provides: the bytes of pages.

A page is 64 tokens of all layers and KV heads. Its number means something to its storage alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Bytes = np.ndarray  # uint8, contiguous


class PageTable(Protocol):
    """A sequence's pages in the form that the backend's attention reads."""

    def set(self, index: int, page: int, tier: int) -> None: ...

    def clear(self, index: int) -> None:
        """The page is gone: trimmed, or left behind by the sliding window."""

    @property
    def nbytes(self) -> int: ...


class Storage(Protocol):
    def page_bytes(self, tier: int) -> int:
        """Bytes of a page with its scales and biases."""

    def make(self, tier: int) -> int:
        """A page; what it holds is undefined."""

    def free(self, page: int, tier: int) -> None: ...

    def copy(self, page: int) -> int:
        """A second hot page with the same contents."""

    def demote(self, pages: Sequence[int], tier: int) -> Callable[[], Sequence[int]]:
        """Start making pages of the next lower tier from full pages of `tier`, which stay as they are until
        the function that is returned, and called once, has given the new pages' numbers."""

    def dump(self, page: int, tier: int) -> Bytes:
        """The page as it is, to be written down before it changes."""

    def load(self, data: bytes, tier: int) -> int:
        """A page made of what `dump` gave."""

    def new_table(self) -> Any:
        """A PageTable (Any: the backend reads more of its own table than the protocol says)."""
