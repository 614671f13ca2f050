"""This module caches the token ids of long texts. An agent (a program that calls the server) sends its whole
conversation with every turn. Without the cache, the tokenizer would encode, for example, 8,000 tokens again,
which takes tens of milliseconds before the first new token."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

MIN_RUN_CHARACTERS = 500  # the minimum length of a cached text, because short texts are fast
# the maximum number of characters of all cached texts together; the least recently used text is dropped first
MAX_CACHED_CHARACTERS = 1 << 20


class KnownRuns:
    """A cache of the results of encode(text, first). Any thread can call the cache.

    salt: a part of the cache's key, for example a secret of a user. The cache finds a text only if the call
        has the same salt as the call that stored the text. Because of the salt, a user cannot find out, from
        the time of a request, which texts other users have sent.
    """

    def __init__(self, encode: Callable[[str, bool], list[int]]):
        self._encode, self._lock = encode, threading.Lock()
        self._known: OrderedDict[tuple[str, bool, str], array[int]] = OrderedDict()
        self._size = 0

    def __call__(self, text: str, first: bool, salt: str) -> Sequence[int]:
        if len(text) < MIN_RUN_CHARACTERS:
            return self._encode(text, first)
        key = salt, first, text
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        ids = array("I", self._encode(text, first))
        with self._lock:
            if key not in self._known:
                self._known[key], self._size = ids, self._size + len(text)
            while self._size > MAX_CACHED_CHARACTERS:
                self._size -= len(self._known.popitem(last=False)[0][2])
        return ids
