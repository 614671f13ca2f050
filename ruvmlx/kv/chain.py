"""This module makes names for the prefixes (first tokens) of a prompt. The names are a hash chain over whole
pages of tokens.

    names[0]      = H(version, key, salt)
    names[i + 1]  = H(names[i], tokens of page i)         H: BLAKE2b of NAME bytes

The keys and values of a page depend on the model, on all tokens up to the page's end and on other data (Key);
the name of a page depends on the same data. Two prefixes with the same name can therefore share their KV
pages. An adapter of the output head is not part of a name, because it does not change keys and values.
"""

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from .. import __version__ as MADE_BY
from ..tiers import PAGE

NAME = 20  # the length of a name in bytes

Key = dict[str, Any]  # the data, besides the tokens, on which the keys and values depend: a JSON object
Chain = list[bytes]  # the names of a prefix's pages; chain[0] is the name of the empty prefix


def root(key: Key, salt: str = "") -> bytes:
    """Return the name of the empty prefix. salt: a text that the request gives; only requests with equal
    salts share caches."""
    text = json.dumps([MADE_BY, key, salt], sort_keys=True)
    return blake2b(text.encode(), digest_size=NAME, person=b"ruvmlx-kv-root").digest()


def extend(chain: Chain, tokens: Sequence[int]) -> Chain:
    """Append to `chain` the names of those full pages of `tokens` that are not yet in the chain. Returns the
    chain."""
    for start in range(PAGE * (len(chain) - 1), len(tokens) - PAGE + 1, PAGE):
        chain.append(page_name(chain[-1], tokens[start : start + PAGE]))
    return chain


def page_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of a whole or partly filled page. before: the name of the page before this page."""
    return blake2b(before + array("I", tokens).tobytes(), digest_size=NAME, person=b"ruvmlx-kv-page").digest()


def shared_pages(a: Chain, b: Chain) -> int:
    """Return the number of leading pages with the same names in both chains; -1 if the chains begin with
    different names (other keys, salts or versions).

    The search is a bisection: two chains that differ at one page differ at every later page.
    """
    low, high = -1, min(len(a), len(b)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle] == b[middle] else (low, middle - 1)
    return low
