"""This module stores each KV page in its own piece of memory, in the C library's format. The number of a page
is its memory address."""

import ctypes as C
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ...kernels.page_table import NativePageTable, PageMemory
from ...kv.storage import Bytes
from ...tiers import HOT


class PageKernels(Protocol):
    """The protocol of the C functions that work on pages. The classes Decoder and PagedAttention implement
    this protocol. A demotion quantises a page to fewer bits."""

    def page_bytes(self, tier: int) -> int: ...

    def demote(self, source: int, tier: int, target: int, lower: int) -> None:
        """Quantise the page at address `source`, of `tier`, into the page at address `target`, of the tier
        `lower`. The call can run while attention reads `source`."""


class NativeStorage:
    layout = "librvm"
    background = True
    limit = 0  # 0: no limit, because the storage keeps no unused pages

    def __init__(self, pages: PageKernels):
        self.pages = pages

    def page_bytes(self, tier: int) -> int:
        return self.pages.page_bytes(tier)

    def is_crowded(self, tier: int, n: int) -> bool:
        return False

    def prepare(self, tier: int, n: int) -> None:
        """Do nothing, because the storage allocates each page separately."""

    def is_sparse(self, tier: int) -> bool:
        return False

    def compact(self, tier: int) -> dict[int, int]:
        return {}

    def make(self, tier: int) -> int:
        return PageMemory.make(self.page_bytes(tier))

    def free(self, page: int, tier: int) -> None:
        assert isinstance(page, PageMemory)
        page.free()

    def copy(self, page: int) -> int:
        to = self.make(HOT)
        C.memmove(to, page, self.page_bytes(HOT))
        return to

    def demote(self, pages: Sequence[int], tier: int) -> Callable[[], Sequence[int]]:
        """Start to convert the pages to the next lower tier, in a thread that runs in parallel to the
        decoder."""
        made: list[int] = []
        try:
            for _ in pages:
                made.append(self.make(tier - 1))
        except BaseException:
            for page in made:
                self.free(page, tier - 1)
            raise
        return Demotion(self.pages, pages, made, tier).result

    def dump(self, page: int, tier: int) -> Bytes:
        """Return the memory of the page itself, without a copy."""
        return np.ctypeslib.as_array((C.c_uint8 * self.page_bytes(tier)).from_address(page))

    def load(self, data: bytes, tier: int) -> int:
        if len(data) != self.page_bytes(tier):
            raise ValueError(f"a page of tier {tier} has {self.page_bytes(tier)} bytes; got {len(data)}")
        to = self.make(tier)
        C.memmove(to, data, self.page_bytes(tier))
        return to

    def new_table(self) -> NativePageTable:
        return NativePageTable()


class Demotion:
    """A running demotion. A thread converts each page of `pages` in `tier` to the page of `to`, in the next
    lower tier, with the same index."""

    def __init__(self, kernels: PageKernels, pages: Sequence[int], to: Sequence[int], tier: int):
        self._kernels, self._tier, self._to = kernels, tier, to
        self._todo = list(zip(pages, to, strict=True))
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="ruvmlx-demote")
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no more threads, so `result` converts the pages
            self._thread = None

    def _run(self) -> None:
        while self._todo:
            page, to = self._todo[0]
            self._kernels.demote(page, self._tier, to, self._tier - 1)
            del self._todo[0]

    def result(self) -> Sequence[int]:
        """Wait for the thread and return the numbers of the new pages. If the thread failed, this method
        converts the remaining pages itself, and if that fails too, the caller gets the error. After a fork of
        the process, this method also converts the remaining pages, because a fork does not copy the
        thread."""
        if self._thread is not None:
            self._thread.join()
        self._run()
        return self._to
