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

    def share(self, other: Any) -> None:
        """`other` is the table of a fork: it gets what lies outside the pages."""

    def flush(self) -> None:
        """Pages hold what was appended; before they are dumped or appended to in another way."""

    @property
    def nbytes(self) -> int: ...


class Storage(Protocol):
    layout: str  # whose order the bytes of `dump` have
    background: bool  # demotions run beside the decoder, so that it pays to begin them ahead of time

    def page_bytes(self, tier: int) -> int:
        """Bytes of a page with its scales and biases."""

    def prepare(self, tier: int, n: int) -> None:
        """n pages of a tier are about to be made."""

    def make(self, tier: int) -> int:
        """A page; what it holds is undefined."""

    def compact(self, tier: int) -> dict[int, int]:
        """Give back memory that the pages of a tier do not need. Their new numbers by the old ones, of all
        or of none."""

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
