"""This module lists the page files of each chat, so that the files of a deleted chat can be deleted.

Each owner (a chat, or REQUESTS) has one text file, `<owner>.uses`: the CRC-32 of the text after the first
line, then one file name on each line. disk.py writes an owner's list before the page files that the list
names. After a crash a list can therefore name a missing file, but each page file is in a list.
"""

import os
import re
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

from ..platform.files import read_ordinary
from . import page_file

USES = ".uses"
REQUESTS = "+requests"  # the owner of the pages of requests outside of chats
_MAX_LIST_BYTES = 64 << 20  # the maximum number of bytes of an owner's list to read
_CHAT = re.compile(r"[0-9A-Za-z_-]{1,64}", re.ASCII)


def fits(owner: str) -> bool:
    """Return True if the cache folder can have files of this owner, because the owner's name is safe as a
    part of a file name."""
    return owner == REQUESTS or bool(_CHAT.fullmatch(owner))


def put(folder: Path, owner: str, names: Collection[str]) -> None:
    """Replace this owner's list by the file names `names`."""
    text = "".join(f"{name}\n" for name in names).encode()
    fresh = folder / f"{owner}.{os.getpid()}{page_file.UNFINISHED}"
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(handle, "wb") as out:
            out.write(b"%08x\n" % zlib.crc32(text) + text)
            out.flush()
            os.fsync(handle)
        os.replace(fresh, folder / (owner + USES))
    except BaseException:
        page_file.unlink(fresh)
        raise


def used_by(folder: Path, owner: str) -> list[str]:
    """Return the names of the page files in an owner's list. The list is empty if the owner has no list or a
    damaged list."""
    try:
        crc, _, text = read_ordinary(folder / (owner + USES), _MAX_LIST_BYTES).partition(b"\n")
        return text.decode().splitlines() if int(crc, 16) == zlib.crc32(text) else []
    except (OSError, ValueError):
        return []


def all_owners(folder: Path) -> list[str]:
    """Return the names of all owners that have a list in the folder."""
    try:
        return [name.removesuffix(USES) for name in os.listdir(folder) if name.endswith(USES)]
    except OSError:
        return []


def used_files(folder: Path, owners: Iterable[str]) -> set[str]:
    """Return the names of the files that any of these owners uses."""
    return {name for owner in owners for name in used_by(folder, owner)}
