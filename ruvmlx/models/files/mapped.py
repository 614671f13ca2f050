"""This module returns to the system the memory of arrays that are views of memory-mapped files."""

import mmap

import numpy as np


def release(array: np.ndarray) -> None:
    """Let the system free the memory pages of an array that is a view of a file. A later access reads the
    pages from the file again.

    The function frees the memory pages that lie wholly between the array's first byte and last byte. For an
    array that is writable or is no view of a mapped file, and on a system without MADV_DONTNEED, the function
    does nothing.
    """
    file = _mapping(array)
    if file is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = array.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        file.madvise(mmap.MADV_DONTNEED, first, last - first)


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """Return the memory map of a read-only array that is a view of a file, else None. (To free pages of a
    writable map with MADV_DONTNEED would lose data.)"""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and not array.flags.writeable else None
