"""This module defines the protocol for the memory of pages. Each backend with KV pages implements the
protocol.

A page holds 64 tokens of all layers and KV heads. A page's number has a meaning only for the storage that
made the page.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Bytes = np.ndarray  # uint8, contiguous


class PageTable(Protocol):
    """The page table of one sequence, in the form that the attention of the backend reads."""

    def set(self, index: int, page: int, tier: int) -> None: ...

    def clear(self, index: int) -> None:
        """Remove a page from the table: the page was trimmed, or it is behind the sliding window."""

    def share(self, other: Any) -> None:
        """Share the tokens that are not yet in pages with `other`, the table of a fork of this sequence."""

    def flush(self) -> None:
        """Write appended tokens into their pages. The cache calls `flush` before pages are dumped or written
        in another way."""

    @property
    def nbytes(self) -> int: ...


class Storage(Protocol):
    # the name of the byte layout of `dump`; only a storage with the same layout can load the bytes
    layout: str
    background: bool  # True if demotions run in parallel to decoding; in this case they start early

    limit: int  # the maximum number of bytes of all pages, including unused pages; 0: no limit

    def page_bytes(self, tier: int) -> int:
        """Return the number of bytes of a page, with its scales and biases."""

    def is_crowded(self, tier: int, n: int) -> bool:
        """Return True if n more pages of a tier exceed the limit only because of unused pages, which
        `compact` returns."""

    def prepare(self, tier: int, n: int) -> None:
        """Get the memory for n new pages of a tier, if needed. The cache calls `prepare` before it makes the
        pages."""

    def make(self, tier: int) -> int:
        """Make a page and return its number. The page's contents are undefined."""

    def compact(self, tier: int) -> dict[int, int]:
        """Return unused memory of a tier to the system. Returns {old number: new number} of all pages of the
        tier, or {} if no number has changed."""

    def free(self, page: int, tier: int) -> None: ...

    def copy(self, page: int) -> int:
        """Copy a hot page and return the number of the copy."""

    def demote(self, pages: Sequence[int], tier: int) -> Callable[[], Sequence[int]]:
        """Start to convert full pages of `tier` to the next lower tier. Returns a function that the caller
        must call once. This function waits for the demotion and returns the numbers of the new pages. The old
        pages must not change before this function returns."""

    def dump(self, page: int, tier: int) -> Bytes:
        """Return the bytes of a page. The caller must use the bytes before the page changes."""

    def load(self, data: bytes, tier: int) -> int:
        """Return the number of a new page made from the bytes of `dump`."""

    def new_table(self) -> Any:
        """Return a PageTable. The type of the result is Any, because a backend uses more attributes of its
        own table than the protocol has."""
