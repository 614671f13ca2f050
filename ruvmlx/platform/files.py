"""This module reads files of unknown origin safely, and writes files so that a crash leaves no broken
file."""

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

ENDING = ".new"  # the end of the name of a temporary file, which later replaces another file
IDLE_SECONDS = 3600.0  # seconds without a write after which a temporary file counts as abandoned
# The error codes of `os.link` on a file system without hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# the number of characters of the target's name in the temporary file's name, because file names have a
# maximum length
_NAME_LENGTH = 50
_SWAP = 2  # the flag RENAME_EXCHANGE of Linux, and the flag RENAME_SWAP of macOS
_HERE = -100  # the constant AT_FDCWD of Linux, which stands for the working folder


def open_ordinary(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for a pipe or a device, which can be endless, and for a
    folder."""
    # With O_NONBLOCK, the opening of a pipe without a writer does not wait for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not an ordinary file")
    return open(handle, "rb")


def read_ordinary(path: Path, limit: int) -> bytes:
    """Return all bytes of a file. Raises OSError for a pipe, a device or a folder, and if the file has more
    than `limit` bytes."""
    with open_ordinary(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
        return file.read(size)


# -- new files ---------------------------------------------------------------------------------------


@contextmanager
def file_beside(path: Path) -> Iterator[Path]:
    """Create an empty temporary file in the folder of `path`, with a name that no other process uses.

    The end of the `with` block removes the file and the files that SQLite makes beside a database, so the
    caller must rename or link the file before. The function first removes the temporary files that killed
    processes left for `path`. Raises OSError.
    """
    remove_abandoned(path.parent, path.name)
    handle, name = tempfile.mkstemp(ENDING, f".{path.name[:_NAME_LENGTH]}.{os.getpid()}.", path.parent)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        for ending in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                os.unlink(f"{name}{ending}")


@contextmanager
def folder_beside(folder: Path) -> Iterator[Path]:
    """Create a temporary empty folder beside `folder`. The end of the `with` block removes the folder if it
    still has its temporary name. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent, folder.name)
    prefix = f".{folder.name[:_NAME_LENGTH]}.{os.getpid()}."
    fresh = Path(tempfile.mkdtemp(ENDING, prefix, folder.parent))
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end of the `with` block. If the disk is full, the old
    file stays intact. After the block, the new file is on the disk, so it survives a power failure. Raises
    OSError."""
    with file_beside(path) as fresh:
        with open(fresh, "wb") as file:
            yield file
            file.flush()
            flush_to_disk(file.fileno())
        os.replace(fresh, path)
        sync_folder(path.parent)


def publish(fresh: Path, path: Path) -> None:
    """Give the temporary file `fresh` the name `path`, so that the name survives a power failure. Raises
    FileExistsError if a file with this name exists, and OSError."""
    try:
        os.link(fresh, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.rename(fresh, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write a folder's renames to the disk, so that the new names survive a power failure. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        flush_to_disk(handle)
    finally:
        os.close(handle)


def flush_to_disk(handle: int) -> None:
    """Write an open file or folder to the disk. On macOS, fsync leaves the data in the drive's own cache, so
    the function calls F_FULLFSYNC first, which some file systems refuse. Raises OSError."""
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with suppress(OSError):
            fcntl.fcntl(handle, full)
            return
    os.fsync(handle)


# -- abandoned files ---------------------------------------------------------------------------------


def remove_abandoned(folder: Path, name: str = "") -> None:
    """Remove the temporary files and folders of killed processes, and those that are older than IDLE_SECONDS.
    name: the name of the file or folder for which the temporary files were made; "" for all."""
    wanted = glob.escape(name[:_NAME_LENGTH]) if name else "*"
    for path in folder.glob(f".{wanted}.*.*{ENDING}*"):
        with suppress(OSError):
            if _is_abandoned(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_abandoned(path: Path) -> bool:
    process = path.name.rpartition(ENDING)[0].split(".")[-2]
    if not process.isdecimal() or path.is_symlink():
        return False
    return not _is_running(int(process)) or path.stat().st_mtime < time.time() - IDLE_SECONDS


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process runs and belongs to another user
        return True
    return True


# -- folders -----------------------------------------------------------------------------------------


def swap(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one system call, so that no moment is without one of the
    names. Return False if the exchange fails, for example because the system cannot exchange names in one
    call."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            return libc.renamex_np(os.fsencode(one), os.fsencode(other), _SWAP) == 0
        return libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _SWAP) == 0
    except AttributeError:  # an older C library does not have the function
        return False
