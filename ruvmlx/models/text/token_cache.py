"""Remembers the token ids of long texts. An agent sends its whole conversation with every turn; encoding
8,000 tokens again takes tens of milliseconds before the first new token."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

MIN_RUN_CHARACTERS = 500  # characters: shorter texts are encoded fast enough
MAX_CACHED_CHARACTERS = 1 << 20  # characters that are kept: those used last


class KnownRuns:
    """Remembers what encode(text, first) returned. Can be called from any thread.

    salt: a text is found only with the salt with which it was encoded. So the time tells no one which texts
        other people have sent.
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
