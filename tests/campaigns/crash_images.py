"""Images of a folder as a crash of the machine can leave it, made from the log of crash_shim.c.

What the log says was done is not what the disk has.  Up to a moment of the crash,

* of a file's contents the disk has all that was written before the file's last fsync, and of the later writes
  and changes of size any subset; the last of these may be cut off at any byte
* of a folder's names the disk has all changes before the folder's last fsync, and of the later ones the first
  few (journals of file systems keep the order within a folder, not between folders)

A file whose name is on the disk can therefore be empty, and a synced file can have no name.  The model is
harsher than ext4 in its usual mode, which also keeps the order between folders and writes data before names.
"""

import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEAD = struct.Struct("<cQqIII")
CONTENT, NAMES = b"TWZ", b"CRXLUMDK"


@dataclass(frozen=True)
class Op:
    """One record of the log; crash_shim.c says what each field means. Paths are relative to the folder."""

    kind: bytes
    inode: int
    offset: int
    path: str
    other: str
    data: bytes

    @property
    def folder(self) -> str:
        """The folder whose names change; of a rename that of the new name."""
        return os.path.dirname(self.other if self.kind in b"RXL" else self.path)


def read_log(log: Path, root: Path) -> list[Op]:
    """The calls of a run. A path outside `root` stays whole."""
    data, at, found = log.read_bytes(), 0, []
    while at < len(data):
        kind, inode, offset, one, other, more = HEAD.unpack_from(data, at)
        at += HEAD.size
        words = data[at : at + one + other]
        names = [_inside(os.fsdecode(name), root) for name in (words[:one], words[one:])]
        found.append(Op(kind, inode, offset, *names, data[at + one + other : at + one + other + more]))
        at += one + other + more
    return found


def _inside(path: str, root: Path) -> str:
    """The path relative to the folder; "" for the folder itself, and for no path."""
    found = os.path.relpath(path, root) if path else ""
    return "" if found == "." else found


@dataclass
class Disk:
    """What a disk holds. names: {path: number of a content}; a folder has the number None. links: the numbers
    of symbolic links, whose content is where they point."""

    names: dict[str, int | None] = field(default_factory=dict)
    contents: dict[int, bytearray] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    links: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, folder: Path) -> "tuple[Disk, dict[int, int]]":
        """The disk that holds this folder, and {inode: number of its content}."""
        disk, known = cls(), {}
        for path in sorted(folder.rglob("*")):
            name, found = str(path.relative_to(folder)), path.lstat()
            disk.modes[name] = found.st_mode & 0o777
            is_link = path.is_symlink()
            is_folder = path.is_dir() and not is_link
            disk.names[name] = None if is_folder else known.setdefault(found.st_ino, len(known))
            if is_link:
                disk.contents[known[found.st_ino]] = bytearray(os.fsencode(os.readlink(path)))
                disk.links.add(known[found.st_ino])
            elif path.is_file():
                disk.contents[known[found.st_ino]] = bytearray(path.read_bytes())
        return disk, known

    def write(self, folder: Path) -> None:
        """Make the folder hold this, with nothing else in it."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, number in sorted(self.names.items()):
            path = folder / name
            if not path.parent.is_dir():  # the name of its folder is lost
                continue
            if number is None:
                path.mkdir(self.modes.get(name, 0o700))
            elif number in self.links:
                path.symlink_to(os.fsdecode(bytes(self.contents[number])))
            else:
                path.write_bytes(self.contents.get(number, b""))
                path.chmod(self.modes.get(name, 0o600))

    def apply_content(self, op: Op, number: int) -> None:
        content = self.contents.setdefault(number, bytearray())
        if op.kind == b"W":
            content.extend(bytes(max(0, op.offset - len(content))))
            content[op.offset : op.offset + len(op.data)] = op.data
        else:
            size = op.offset if op.kind == b"Z" else 0
            del content[size:]
            content.extend(bytes(size - len(content)))

    def apply_name(self, op: Op, number: int | None) -> None:
        """A change whose file or folder is not on the disk is left out."""
        if op.kind in b"CMK":
            self.names.setdefault(op.path, number)
            if op.kind == b"K" and number is not None:
                self.contents[number] = bytearray(op.data)
                self.links.add(number)
        elif op.kind in b"UD":
            self.names.pop(op.path, None)
        elif op.path in self.names:
            if op.kind == b"L":
                self.names[op.other] = self.names[op.path]
            else:
                moved, exchanged = self._take(op.path), self._take(op.other)
                self._put(op.other, moved)
                if op.kind == b"X":
                    self._put(op.path, exchanged)

    def _take(self, path: str) -> dict[str, int | None]:
        inside = [name for name in self.names if name == path or name.startswith(f"{path}/")]
        return {name[len(path) :]: self.names.pop(name) for name in inside}

    def _put(self, path: str, names: dict[str, int | None]) -> None:
        self.names |= {path + ending: number for ending, number in names.items()}


class Replay:
    """The images of one run. base: the folder before the run; ops: what it did; inodes: {inode: number}."""

    def __init__(self, base: Disk, inodes: dict[int, int], ops: list[Op]):
        self._base, self._ops = base, ops
        self._numbers: list[int | None] = []  # of the content that each call concerns
        known, new = dict(inodes), len(inodes)
        for op in ops:
            if op.kind in b"CK":
                known[op.inode], new = new, new + 1
            elif op.kind == b"M":
                known.pop(op.inode, None)  # the number of a removed file
            self._numbers.append(known.get(op.inode))

    def __len__(self) -> int:
        return len(self._ops)

    def images(self, count: int, seed: int) -> Iterator[tuple[bool, Disk]]:
        """So many random images: (did the run end before the crash?, the disk)."""
        rng = random.Random(seed)
        for _ in range(count):
            end = len(self._ops) if rng.random() < 0.2 else rng.randrange(len(self._ops) + 1)
            yield end == len(self._ops), self.image(rng, end)

    def image(self, rng: random.Random, end: int) -> Disk:
        """The disk after a crash before call number `end`."""
        kept = self._kept_contents(rng, end) | self._kept_names(rng, end)
        disk = Disk(dict(self._base.names), {k: bytearray(v) for k, v in self._base.contents.items()})
        disk.modes, disk.links = self._base.modes, set(self._base.links)
        for i in sorted(kept):
            op, number = self._ops[i], self._numbers[i]
            if op.kind in CONTENT and number is not None:
                cut = kept[i]
                disk.apply_content(op if cut is None else _cut(op, cut), number)
            elif op.kind in NAMES:
                disk.apply_name(op, None if op.kind == b"M" else number)
        return disk

    def _kept_contents(self, rng: random.Random, end: int) -> dict[int, int | None]:
        """{call: bytes of it, None for all} of contents."""
        chance = rng.choice((0.0, 0.3, 0.7, 1.0))
        kept: dict[int, int | None] = {}
        pending: dict[int, list[int]] = {}
        for i, op in enumerate(self._ops[:end]):
            number = self._numbers[i]
            if number is None:
                continue
            if op.kind in CONTENT:
                pending.setdefault(number, []).append(i)
            elif op.kind == b"S":
                kept |= dict.fromkeys(pending.pop(number, ()))
        for calls in pending.values():
            some = [i for i in calls if rng.random() < chance]
            kept |= dict.fromkeys(some)
            if some and self._ops[some[-1]].kind == b"W" and rng.random() < 0.5:
                kept[some[-1]] = rng.randrange(len(self._ops[some[-1]].data) + 1)
        return kept

    def _kept_names(self, rng: random.Random, end: int) -> dict[int, int | None]:
        kept: dict[int, int | None] = {}
        pending: dict[str, list[int]] = {}
        for i, op in enumerate(self._ops[:end]):
            if op.kind in NAMES:
                pending.setdefault(op.folder, []).append(i)
            elif op.kind == b"S":
                kept |= dict.fromkeys(pending.pop(op.path, ()))
        for calls in pending.values():
            many = rng.choice((0, len(calls), rng.randrange(len(calls) + 1)))
            kept |= dict.fromkeys(calls[:many])
        return kept


def _cut(op: Op, size: int) -> Op:
    return Op(op.kind, op.inode, op.offset, op.path, op.other, op.data[:size])
