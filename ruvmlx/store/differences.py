"""This module writes the weights of an adapter as the difference from similar weights. The result is exact,
bit for bit.

A rating changes most numbers of the weights a little. The bits of a float32, read as an integer, also change
a little then. So a difference holds, for each number of the older weights that is not 0, the integer of the
newer number minus the integer of the older number. Small differences have up to three bytes of zeros, which
are compressed. Numbers that were 0 and are not 0 now stand in a list at the end, each with its place.

    difference = crc32 of the weights [4 bytes], deflate(first bytes of all words, second bytes, ...)
    words      = changes of the numbers that were not 0, then steps to each place where a 0 became a number,
                 then these new numbers
"""

import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptFile

_CRC_BYTES = 4
# Arrays in a .npz file can begin at any byte, not only at multiples of 4. So each part, from one array's
# magic number to the next, is read as words of its own.
_ARRAY = b"\x93NUMPY"

Words = NDArray[np.uint32]


def difference(state: bytes, older: bytes) -> bytes | None:
    """Return the difference of weights from older weights; None if the arrays in the two do not begin at the
    same places."""
    parts = _parts(older)
    if _parts(state) != parts:
        return None
    now, before = _words(state, parts), _words(older, parts)
    known = np.flatnonzero(before)
    new = np.flatnonzero((before == 0) & (now != 0))
    steps = np.diff(new, prepend=0).astype(np.uint32)
    words = np.concatenate([_fold_sign(now[known] - before[known]), steps, now[new]])
    return zlib.crc32(state).to_bytes(_CRC_BYTES, "little") + _deflate(words)


def add_differences(oldest: bytes, differences: Sequence[bytes]) -> bytes:
    """Add a chain of differences to the oldest weights and return the newest weights. The first difference is
    relative to the oldest weights; each later difference is relative to the result of the differences before
    it. Raises CorruptFile if a difference is damaged, is missing or belongs to other weights."""
    parts = _parts(oldest)
    words = _words(oldest, parts).copy()
    try:
        for stored in differences:
            # A difference has a change of each known number, and two words for each new number.
            _add(words, _inflate(stored[_CRC_BYTES:], 2 * words.nbytes))
    except (zlib.error, ValueError, IndexError):
        raise CorruptFile(DAMAGED) from None
    state = _bytes(words, parts)
    if differences and zlib.crc32(state) != int.from_bytes(differences[-1][:_CRC_BYTES], "little"):
        raise CorruptFile(DAMAGED)
    return state


def _add(words: Words, changes: Words) -> None:
    """Add one difference to the weights (32-bit words), in place."""
    known = np.flatnonzero(words)
    steps, new = changes[known.size :].reshape(2, -1)
    words[known] += _unfold_sign(changes[: known.size])
    words[np.cumsum(steps)] = new


DAMAGED = "the stored adapter is damaged; `ruvmlx learn undo` goes back one version."


# -- words -------------------------------------------------------------------------------------------


def _parts(state: bytes) -> list[int]:
    """Return the byte positions at which the parts of the weights begin and end. A part reaches from the
    magic number of one array in the .npz file to that of the next array; the first part begins at byte 0."""
    parts = [0]
    while (at := state.find(_ARRAY, parts[-1] + 1)) > 0:
        parts.append(at)
    return [*parts, len(state)]


def _words(state: bytes, parts: list[int]) -> Words:
    """Return the weights as 32-bit words. Each part (one array) is filled up to whole words with bytes of
    0."""
    pieces = (state[a:b] + bytes(-(b - a) % 4) for a, b in pairwise(parts))
    return np.frombuffer(b"".join(pieces), "<u4")


def _bytes(words: Words, parts: list[int]) -> bytes:
    data, at, pieces = words.astype("<u4", copy=False).tobytes(), 0, []
    for size in (b - a for a, b in pairwise(parts)):
        pieces.append(data[at : at + size])
        at += size + -size % 4
    return b"".join(pieces)


def _fold_sign(changes: Words) -> Words:
    """Return 0, 2, 4 .. for changes 0, 1, 2 .., and 1, 3, 5 .. for -1, -2, -3 .., so that small changes have
    small numbers."""
    signed = changes.view(np.int32)
    return ((signed << 1) ^ (signed >> 31)).view(np.uint32)


def _unfold_sign(folded: Words) -> Words:
    return ((folded >> 1) ^ (0 - (folded & 1))).astype(np.uint32)


def _deflate(words: Words) -> bytes:
    """Compress the lowest bytes of all words, then the second bytes, and so on. zlib looks only for runs of
    equal bytes, because other repetitions are rare and a search for them would take longer."""
    planes = words.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4).T.tobytes()
    packer = zlib.compressobj(strategy=zlib.Z_RLE)
    return packer.compress(planes) + packer.flush()


def inflate(data: bytes, most: int) -> bytes:
    """Decompress data. Raises zlib.error if the data is damaged, or if the result has more than `most` bytes,
    because a few bytes can become very many."""
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(data, most + 1)
    if not unpacker.eof or len(found) > most:
        raise zlib.error("the data is cut off, or its result is too long")
    return found


def _inflate(data: bytes, most: int) -> Words:
    planes = np.frombuffer(inflate(data, most), np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view("<u4").ravel()
