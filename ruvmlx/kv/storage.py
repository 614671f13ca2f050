"""This module defines `Storage`, the protocol of the memory that holds KV pages. Each backend with KV pages
implements the protocol.

A page holds 64 tokens of all layers and KV heads. A page's number is valid only in the storage that made the
page.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Bytes = np.ndarray  # uint8, contiguous


class PageTable(Protocol):
    """The page table of one sequence, in the form that the attention of the backend reads."""

    def set(self, index: int, page: int, tier: int) -> None: ...

    def clear(self, index: int) -> None:
        """Remove the page `index` from the table. The cache calls `clear` for a page that was trimmed, that
        is before the sliding window, or that was reserved for a run that failed."""

    def share(self, other: Any) -> None:
        """Give the newest tokens, which are not yet in a page, also to `other`, the table of a fork of this
        sequence."""

    def flush(self) -> None:
        """Write the newest tokens, which are not yet in a page, into their page. `flush` must be called
        before the pages are dumped or before a prompt is written into the pages."""

    @property
    def nbytes(self) -> int: ...


class Storage(Protocol):
    # the name of the byte layout of `dump`; only a storage with the same layout can load the bytes
    layout: str
    background: bool  # True if demotions run in parallel to decoding; the cache then starts them early

    limit: int  # the maximum number of bytes of all pages, including unused pages; 0: no limit

    def page_bytes(self, tier: int) -> int:
        """Return the number of bytes of a page of this tier, with the scales and biases of the codes."""

    def is_crowded(self, tier: int, n: int) -> bool:
        """Return True if the storage would have to grow beyond `limit` for n more pages of a tier, so that
        `compact` can help."""

    def prepare(self, tier: int, n: int) -> None:
        """Allocate memory for n new pages of a tier, unless enough unused pages exist or the storage
        allocates each page separately. The cache calls `prepare` before it makes the pages."""

    def make(self, tier: int) -> int:
        """Make a page and return its number. The page's contents are undefined."""

    def is_sparse(self, tier: int) -> bool:
        """Return True if `compact` would return memory of this tier to the system."""

    def compact(self, tier: int) -> dict[int, int]:
        """Return the unused page memory of a tier to the system. Returns {old number: new number} of all
        pages of the tier, or {} if no number has changed."""

    def free(self, page: int, tier: int) -> None: ...

    def copy(self, page: int) -> int:
        """Copy a hot page and return the number of the copy."""

    def demote(self, pages: Sequence[int], tier: int) -> Callable[[], Sequence[int]]:
        """Start to convert full pages of `tier` to the next lower tier. Returns a function that the caller
        must call once: it waits for the demotion and returns the numbers of the new pages. The old pages must
        not change before the call of the returned function ends."""

    def dump(self, page: int, tier: int) -> Bytes:
        """Return the bytes of a page. The bytes are valid only until the page changes."""

    def load(self, data: bytes, tier: int) -> int:
        """Make a page from `data`, the result of `dump`, and return the page's number."""

    def new_table(self) -> Any:
        """Return an empty PageTable. The declared type is Any, because a backend also uses attributes of its
        table class that PageTable does not have."""
