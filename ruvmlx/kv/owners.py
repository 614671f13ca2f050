"""Which chat uses which files of the store, so that a deleted chat leaves nothing that only it used.

One text file for each owner, `<owner>.uses`: the CRC-32 of the rest, then one file name a line. It is written
before the files that it names: a crash leaves a name without its file, never a file without an owner for
long.
"""

import os
import re
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

from ..platform.files import read_ordinary
from . import page_file

USES = ".uses"
REQUESTS = "+requests"  # owns what was read for requests outside of chats
_MAX_LIST_BYTES = 64 << 20  # bytes of a list
_CHAT = re.compile(r"[0-9A-Za-z_-]{1,64}", re.ASCII)


def fits(owner: str) -> bool:
    """Can it own files? Only names that stay in their folder."""
    return owner == REQUESTS or bool(_CHAT.fullmatch(owner))


def put(folder: Path, owner: str, names: Collection[str]) -> None:
    """Replace what this owner uses."""
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
    """Names of files; none if there is no such owner, or if its list is damaged."""
    try:
        crc, _, text = read_ordinary(folder / (owner + USES), _MAX_LIST_BYTES).partition(b"\n")
        return text.decode().splitlines() if int(crc, 16) == zlib.crc32(text) else []
    except (OSError, ValueError):
        return []


def known(folder: Path) -> list[str]:
    """All owners."""
    try:
        return [name.removesuffix(USES) for name in os.listdir(folder) if name.endswith(USES)]
    except OSError:
        return []


def used(folder: Path, owners: Iterable[str]) -> set[str]:
    """Names of the files that any of these use."""
    return {name for owner in owners for name in used_by(folder, owner)}
