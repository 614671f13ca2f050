"""This module has GPT-2's mapping of bytes to printable characters. The files of byte-level vocabularies
write each byte of a token as one of these 256 characters."""

from functools import cache


@cache
def byte_chars() -> str:
    """Return 256 characters, one for each byte value. A printable Latin-1 byte is its own character. The
    other bytes get the characters from U+0100 on."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(b) if b in kept else chr(next(others)) for b in range(256))


@cache
def _values() -> dict[str, int]:
    return {char: value for value, char in enumerate(byte_chars())}


def piece_to_bytes(piece: str) -> bytes:
    r"""Return the bytes of a token from its text in a tokenizer's file: "Ġhé" becomes b" h\\xe9". A character
    outside the mapping becomes its own UTF-8 bytes."""
    values = _values()
    try:
        return bytes([values[char] for char in piece])
    except KeyError:
        return b"".join(bytes([values[c]]) if c in values else c.encode() for c in piece)
