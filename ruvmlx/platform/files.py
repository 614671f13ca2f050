"""Files that only the user can read, and files that may be anything."""

import ctypes
import errno
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

ENDING = ".new"  # of the name of a file that is being written
IDLE_SECONDS = 3600.0  # after its last write, such a file belongs to no process any more
# What a file system without hard links says to `os.link`.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NAME_LENGTH = 50  # characters of the target's name in the name of the new file: names have a limit
_SWAP = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_HERE = -100  # AT_FDCWD of Linux


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
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
        return file.read(size)


# -- new files ---------------------------------------------------------------------------------------


@contextmanager
def file_beside(path: Path) -> Iterator[Path]:
    """A new, empty file in the folder of `path`, under a name that no other process uses.

    In the end it is removed, with the files that SQLite puts beside a database; rename it before, or link it.
    The files of killed processes that wanted to write `path` are removed first. Raises OSError.
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
    """As `file_beside`, a new, empty folder; what is left of it in the end is removed. Raises OSError."""
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
    """A file written beside its target and then renamed: a full disk leaves the old one intact, and a power
    failure afterwards the new one. Raises OSError."""
    with file_beside(path) as fresh:
        with open(fresh, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        sync_folder(path.parent)


def publish(fresh: Path, path: Path) -> None:
    """Give a new file its name, durably, unless that name is taken: FileExistsError. Raises OSError."""
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
    """Make renames in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- what killed processes left ----------------------------------------------------------------------


def remove_abandoned(folder: Path, name: str = "") -> None:
    """Remove what killed processes left of `file_beside` and `folder_beside`. name: only for this target."""
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
    except OSError:  # of another user
        return True
    return True


# -- folders -----------------------------------------------------------------------------------------


def swap(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one step; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            return libc.renamex_np(os.fsencode(one), os.fsencode(other), _SWAP) == 0
        return libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _SWAP) == 0
    except AttributeError:  # an older C library
        return False
