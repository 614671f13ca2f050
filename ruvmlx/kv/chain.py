"""Names of prefixes: a hash chain over whole pages of tokens.

    names[0]      = H(version, key, salt)
    names[i + 1]  = H(names[i], tokens of page i)         H: BLAKE2b of NAME bytes

So a name stands for all that the keys and values of its page depend on: two prefixes with the same name may
share their pages. What is not in a name does not change keys and values: an adapter of the output head.
"""

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from .. import __version__ as MADE_BY
from ..tiers import PAGE

NAME = 20  # bytes

Key = dict[str, Any]  # what keys and values depend on besides the tokens; plain JSON
Chain = list[bytes]  # the names of a prefix's pages; [0] is that of the empty prefix


def root(key: Key, salt: str = "") -> bytes:
    """The name of the empty prefix. salt: caches are shared only between equal salts."""
    text = json.dumps([MADE_BY, key, salt], sort_keys=True)
    return blake2b(text.encode(), digest_size=NAME, person=b"ruvmlx-kv-root").digest()


def extend(chain: Chain, tokens: Sequence[int]) -> Chain:
    """Append the names of the whole pages of `tokens` that the chain does not have yet; returns the chain."""
    for start in range(PAGE * (len(chain) - 1), len(tokens) - PAGE + 1, PAGE):
        chain.append(named(chain[-1], tokens[start : start + PAGE]))
    return chain


def named(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page, or of the beginning of one. before: the name of the page before it."""
    return blake2b(before + array("I", tokens).tobytes(), digest_size=NAME, person=b"ruvmlx-kv-page").digest()


def shared_pages(a: Chain, b: Chain) -> int:
    """Number of leading pages that both have; -1 if they differ in the key or the salt.

    Bisection: where two chains differ once, they differ from there on.
    """
    low, high = -1, min(len(a), len(b)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle] == b[middle] else (low, middle - 1)
    return low
