"""Files that only the user can read, and files that may be anything."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def open_ordinary(path: Path) -> BinaryIO:
    """A file opened for reading. OSError for a pipe or a device, which may be endless, and for a folder."""
    # NONBLOCK: a pipe that nobody writes into would wait for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not an ordinary file")
    return open(handle, "rb")


def read_ordinary(path: Path, limit: int) -> bytes:
    """All bytes of a file; OSError as `open_ordinary`, and if there are more than `limit`."""
    with open_ordinary(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
    return data


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file written beside its target and then renamed: a full disk leaves the old one intact. Raises
    OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def synced_folder(folder: Path) -> None:
    """Make renames in a folder durable. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
