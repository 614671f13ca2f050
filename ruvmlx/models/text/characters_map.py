"""This module checks the table with which SentencePiece replaces characters before it encodes a text.
The name of the table in files is precompiled_charsmap. The library `tokenizers` panics if a part of the table
is missing.

    table = size of the trie in bytes [uint32], trie [n uint32], texts that replace characters, each with a 0

The trie is a double array (Aoe, "An efficient digital search algorithm by using a double-array structure",
1989) in the form of darts-clone. The children of node i are at i ^ offset ^ (0 to 255).
"""

import numpy as np

MOST_BYTES = 256  # of one text that replaces characters; the longest one of NFKC has 33
_BLOCK = 256  # the number of places for the children of one node


def fault_of_map(data: bytes) -> str:
    """Return what is wrong with a table, in words, or "" if the table is sound."""
    size = int.from_bytes(data[:4], "little")
    if size == 0 or size % (4 * _BLOCK) or 4 + size > len(data):
        return f"its trie of {size} bytes does not fit in {len(data)} bytes"
    units, texts = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64), data[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        return "its texts are not UTF-8"
    if max(map(len, texts.split(b"\0"))) > MOST_BYTES:
        return f"it replaces a character by more than {MOST_BYTES} bytes"
    nodes = np.flatnonzero(units >> 31 == 0)  # the other units are values
    children = nodes ^ (units[nodes] >> 10 << ((units[nodes] & 512) >> 6))
    if np.any(children | (_BLOCK - 1) >= len(units)):
        return "a node of its trie is outside of the trie"
    values = units[children[units[nodes] >> 8 & 1 == 1]] & 0x7FFFFFFF
    if np.any(values >= len(texts)):
        return "a text that it names is outside of the table"
    begins = np.frombuffer(texts, np.uint8)[values]
    return "a text that it names begins within a character" if np.any(begins & 0xC0 == 0x80) else ""
