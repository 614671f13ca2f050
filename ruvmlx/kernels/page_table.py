"""This module has the page tables that the C library's attention reads, and the memory of pages
(neon/include/rvm_pages.h)."""

import ctypes as C
import functools
from collections.abc import Callable

import numpy as np

from ruvmlx.errors import RuvmlxError
from ruvmlx.kernels.library import _load
from ruvmlx.tiers import PAGE

ROW = np.dtype([("data", np.uint64), ("tier", np.uint32), ("unused", np.uint32)])  # struct rvm_page
FIRST_ROWS = 64


def row(address: int, tier: int) -> np.ndarray:
    """Return one row of a page table, the address and the tier of a page, in the form that C reads: an array
    [1]."""
    return np.array([(address, tier, 0)], ROW)


class NativePageTable:
    """A table of the pages of one sequence. Row i is the page of the tokens 64 i to 64 i + 63. A row of zeros
    stands for a missing page."""

    def __init__(self) -> None:
        self.rows = np.zeros(FIRST_ROWS, ROW)

    def set(self, index: int, page: int, tier: int) -> None:
        """Set a row. page: the address of the page."""
        if index >= len(self.rows):
            longer = np.zeros(max(2 * len(self.rows), index + 1), ROW)
            longer[: len(self.rows)] = self.rows
            self.rows = longer
        self.rows[index] = page, tier, 0

    def clear(self, index: int) -> None:
        self.rows[index] = 0, 0, 0

    def share(self, other: "NativePageTable") -> None:
        """Do nothing, because this table holds no token outside its pages."""

    def flush(self) -> None:
        """Do nothing, because appended tokens are written to their pages at once."""

    def pointer(self, tokens: int) -> int:
        """Return the address of row 0. Raises ValueError if the table is too short for this many tokens,
        because C does not know the table's length."""
        if tokens > PAGE * len(self.rows):
            raise ValueError(f"a page table of {len(self.rows)} rows is too short for {tokens} tokens")
        return self.rows.ctypes.data

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows in use."""
        return ROW.itemsize * int(np.count_nonzero(self.rows["data"]))


@functools.cache
def _lib() -> C.CDLL:
    lib = _load()
    lib.rvm_page_make.restype, lib.rvm_page_make.argtypes = C.c_void_p, [C.c_size_t]
    lib.rvm_page_free.restype, lib.rvm_page_free.argtypes = None, [C.c_void_p, C.c_size_t]
    return lib


class PageMemory(int):
    """The address of a page's memory. The memory goes back to the system when the caller calls `free`, or
    when Python deletes this object."""

    nbytes = 0  # the number of bytes of the memory; 0 after `free`

    @classmethod
    def make(cls, nbytes: int) -> "PageMemory":
        """Return a new page, filled with zeros. Raises RuvmlxError if there is no memory."""
        address = _lib().rvm_page_make(nbytes)
        if not address:
            raise RuvmlxError("no memory left for the KV cache; end this chat or close other programs.")
        page = cls(address)
        page.nbytes = nbytes
        return page

    def free(self, library: Callable[[], C.CDLL] = _lib) -> None:
        """Free the memory. library: a default value, because Python deletes a module's names before its last
        objects when the interpreter ends."""
        nbytes, self.nbytes = self.nbytes, 0
        if nbytes:
            library().rvm_page_free(int(self), nbytes)

    __del__ = free
