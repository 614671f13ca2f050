"""Views of memory-mapped files, and how to release their memory."""

import mmap

import numpy as np


def release(array: np.ndarray) -> None:
    """Let the system free the file's pages behind a view. A later access reads them again.

    Frees whole pages between the array's first and last byte. Arrays that are not views of a mapped file are
    ignored.
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
    """Return the read-only mapping that an array views. (DONTNEED on a writable mapping would lose data.)"""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and not array.flags.writeable else None
