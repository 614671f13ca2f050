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
# The error codes of a lock on a file system without locks, for example NFS without its lock service.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# the number of characters of the target's name in the temporary file's name, because file names have a
# maximum length
_NAME_LENGTH = 50
_SWAP = 2  # the flag RENAME_EXCHANGE of Linux, and the flag RENAME_SWAP of macOS
# the flag RENAME_NOREPLACE of Linux, and the flag RENAME_EXCL of macOS
_NO_REPLACE = 4 if sys.platform == "darwin" else 1
_HERE = -100  # the constant AT_FDCWD of Linux, which stands for the working folder


def open_ordinary(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for a pipe or a device, which can be endless, and for a
    folder."""
    # With O_NONBLOCK, the opening of a pipe without a writer does not wait for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(mode) else "it is not an ordinary file")
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
    make_folder(folder.parent, 0o777)
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
    # One system call leaves no moment in which the file has both names. A kill at that moment would leave the
    # temporary name.
    error = _rename(fresh, path, _NO_REPLACE)
    if error == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    if error:
        _link_then_remove(fresh, path)
    sync_folder(path.parent)


def _link_then_remove(fresh: Path, path: Path) -> None:
    """Do what `publish` does, for a system whose rename always replaces a file."""
    try:
        os.link(fresh, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.rename(fresh, path)
    else:
        os.unlink(fresh)


def remove(path: Path) -> None:
    """Remove a file that can be missing, so that it stays away after a power failure. Raises OSError."""
    if os.path.lexists(path):
        os.unlink(path)
        sync_folder(path.parent)


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Create a folder and the missing folders above it, all with this mode, so that they survive a power
    failure. Do nothing if the folder exists. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for made in reversed(missing):
        made.mkdir(mode, exist_ok=True)
    if not missing:
        folder.mkdir(mode, exist_ok=True)  # raises an error if it is no folder
    for made in missing:
        # The user may be allowed to enter the folder above, but not to list it.
        with suppress(PermissionError):
            sync_folder(made.parent)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of blocks that lock the same folder. Raises OSError if the folder cannot be
    opened, and on a file system without locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            reason = "its file system has no locks" if error.errno in NO_LOCKS else error.strerror
            raise OSError(error.errno, reason) from error
        yield
    finally:
        os.close(handle)


def folder_fault(folder: Path) -> OSError | None:
    """Test whether a program can make, lock and remove a file in this folder. Return the error of the first
    failed step; None if all steps succeed."""
    try:
        with file_beside(folder / "lock") as made, made.open("wb") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


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


def remove_abandoned_below(folder: Path) -> None:
    """Remove the abandoned temporary files (`remove_abandoned`) in a folder and in its subfolders. The
    function does not enter the folders inside a subfolder."""
    remove_abandoned(folder)
    for inner in folder.iterdir() if folder.is_dir() else ():
        if inner.is_dir() and not inner.is_symlink():
            remove_abandoned(inner)


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
    return not is_running(int(process)) or path.stat().st_mtime < time.time() - IDLE_SECONDS


def is_running(process: int) -> bool:
    """Return True if a process of this number runs, also if it belongs to another user."""
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
    return _rename(one, other, _SWAP) == 0


def _rename(one: Path, other: Path, flag: int) -> int:
    """Rename with a flag of the system. Returns 0, or the error code."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(os.fsencode(one), os.fsencode(other), flag)
        else:
            failed = libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), flag)
    except AttributeError:  # an older C library does not have the function
        return errno.ENOSYS
    return ctypes.get_errno() or errno.EIO if failed else 0
