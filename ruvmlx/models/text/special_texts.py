"""This module finds the strings of special tokens in a text. A stranger's model can have tens of thousands of
special tokens, and a pattern of all of them would take minutes for a long text."""

import re
from collections.abc import Iterable, Iterator

# Longer strings are not found. The longest special tokens of known models have fewer than 64 characters.
MOST_CHARACTERS = 256


class SpecialTexts:
    """The strings of a model's special tokens. At each place of a text, the longest string counts."""

    def __init__(self, texts: Iterable[str]):
        self._texts = frozenset(text for text in texts if 0 < len(text) <= MOST_CHARACTERS)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[0], set()).add(len(text))
        # {first character of a string: the lengths of these strings, the longest first}
        self._lengths = {first: sorted(all_of, reverse=True) for first, all_of in lengths.items()}
        firsts = "".join(map(re.escape, sorted(lengths)))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> list[str]:
        """Return the parts of a text: a part without special tokens, a special token, a part without special
        tokens, and so on. The first and the last part are without special tokens, and can be empty."""
        parts, end = list[str](), 0
        for at, found in self._find(text):
            parts += [text[end:at], found]
            end = at + len(found)
        return [*parts, text[end:]]

    def occur_in(self, text: str) -> bool:
        """Return True if the text contains a special token."""
        return next(self._find(text), None) is not None

    def _find(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the place and the string of each special token in the text, from the left."""
        place = 0
        while self._first is not None and (begins := self._first.search(text, place)):
            at = begins.start()
            parts = (text[at : at + length] for length in self._lengths[text[at]])
            found = next((part for part in parts if part in self._texts), "")
            if found:
                yield at, found
            place = at + (len(found) or 1)
