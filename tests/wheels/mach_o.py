"""What a 64-bit Mach-O library says of itself, from its bytes (<mach-o/loader.h>, <mach-o/nlist.h>)."""

import struct
from dataclasses import dataclass, field

MAGIC, ARM64, DYLIB = 0xFEEDFACF, 0x0100000C, 6
_SYMTAB, _LOAD_DYLIB, _ID_DYLIB, _RPATH = 0x2, 0xC, 0xD, 0x8000001C
_CODE_SIGNATURE, _BUILD_VERSION = 0x1D, 0x32
_EXTERNAL, _PRIVATE, _TYPE, _SECTION = 0x01, 0x10, 0x0E, 0x0E


@dataclass
class MachO:
    cpu: int
    kind: int
    name: str = ""  # by which others would find it
    loads: list[str] = field(default_factory=list)
    rpaths: list[str] = field(default_factory=list)
    platform: int = 0  # 1: macOS
    oldest: str = ""  # system that it runs on
    signed: bool = False
    exports: set[str] = field(default_factory=set)


def read(data: bytes) -> MachO:
    magic, cpu, _, kind, commands = struct.unpack_from("<5I", data)
    assert magic == MAGIC, hex(magic)
    found, at = MachO(cpu, kind), 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, at)
        _take(found, command, data[at : at + size], data)
        at += size
    return found


def _take(found: MachO, command: int, body: bytes, data: bytes) -> None:
    if command == _ID_DYLIB:
        found.name = _string(body)
    elif command == _LOAD_DYLIB:
        found.loads.append(_string(body))
    elif command == _RPATH:
        found.rpaths.append(_string(body))
    elif command == _BUILD_VERSION:
        found.platform, oldest = struct.unpack_from("<2I", body, 8)
        found.oldest = f"{oldest >> 16}.{oldest >> 8 & 255}"
    elif command == _CODE_SIGNATURE:
        found.signed = True
    elif command == _SYMTAB:
        found.exports = _exports(data, *struct.unpack_from("<4I", body, 8))


def _string(body: bytes) -> str:
    """A command's text stands at the offset that follows its size."""
    (start,) = struct.unpack_from("<I", body, 8)
    return body[start:].split(b"\0")[0].decode()


def _exports(data: bytes, symbols: int, count: int, strings: int, _: int) -> set[str]:
    """C names that are defined here and seen from outside."""
    names = set()
    for i in range(count):
        start, kind, _section, _description, _value = struct.unpack_from("<IBBHQ", data, symbols + 16 * i)
        if kind & _EXTERNAL and not kind & _PRIVATE and kind & _TYPE == _SECTION:
            names.add(data[strings + start :].split(b"\0", 1)[0].decode().removeprefix("_"))
    return names
