"""GPT-2's mapping of bytes to printable characters, in which byte-level vocabularies are written."""

from functools import cache


@cache
def byte_chars() -> str:
    """The character of each byte value: printable Latin-1 as itself, the others from U+0100 up."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(b) if b in kept else chr(next(others)) for b in range(256))


@cache
def _values() -> dict[str, int]:
    return {char: value for value, char in enumerate(byte_chars())}


def piece_to_bytes(piece: str) -> bytes:
    """ "Ġhé" -> b" h\\xe9"; a character outside the mapping stands for its own UTF-8."""
    values = _values()
    try:
        return bytes([values[char] for char in piece])
    except KeyError:
        return b"".join(bytes([values[c]]) if c in values else c.encode() for c in piece)
