"""This module finds the length that a question asks for, for example "three rivers" or "at most 50 words",
and says how well a reply has this length."""

import re
from dataclasses import dataclass

_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NUMBERS = {word: n for n, word in enumerate(_WORDS, 1)} | {"fifteen": 15, "twenty": 20}
MOST_ASKED = 2000  # a larger number in a question is hardly a length
_UPPER_LIMIT = (
    r"at most|no more than|not more than|up to|under|below|fewer than|less than|within|maximum of|max"
)
_LOWER_LIMIT = r"at least|no less than|no fewer than|more than|over|minimum of"
_ASKS = (
    r"in|with|using|of|exactly|about|around|roughly|write|give|list|name|suggest|tell|show|find|propose"
    r"|recommend|mention|provide|describe|explain|say|answer|me|us|only|just"
)
_UNITS = {"word": "word", "sentence": "sentence", "paragraph": "paragraph", "line": "line"}
_NUMBER = rf"(?P<number>\d{{1,4}}|{'|'.join(_NUMBERS)}%s)"
# This pattern finds a length in units of text, as in "in two sentences". The next pattern finds a number of
# items, as in "name two rivers".
_OF_TEXT = re.compile(
    rf"\b(?:(?P<most>{_UPPER_LIMIT})|(?P<least>{_LOWER_LIMIT})|{_ASKS})\s+(?:a\s+(?=\S+-))?"
    rf"{_NUMBER % '|a'}[\s-]+"
    r"(?:(?!few|couple)\w+\s+)?(?P<unit>word|sentence|paragraph|line)s?\b",
    re.IGNORECASE,
)
_OF_ITEMS = re.compile(
    r"\b(?:list|name|give|suggest|tell|show|find|propose|recommend|mention|provide|write)(?:\s+(?:me|us))?"
    rf"(?:\s+(?:(?P<most>{_UPPER_LIMIT})|(?P<least>{_LOWER_LIMIT})|exactly|the|about))?\s+{_NUMBER % ''}\s+"
    r"(?:[\w-]+\s+){0,2}?(?P<unit>[a-z]{2,}s)\b",
    re.IGNORECASE,
)
_ITEM = re.compile(r"^\s*(?:[-*+•]|\(?\d{1,3}[.)])\s+\S", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_SEPARATOR = re.compile(r",\s+(?:and|or)\s|,|;|\s+(?:and|or)\s+")
# A user counts words roughly. A reply that has at least this share of the words has the asked length.
WORD_TOLERANCE = 0.85


@dataclass(frozen=True)
class AskedLength:
    """The length that a question asks for. limit: "exact", "most" or "least". unit: a key of _UNITS, or
    "item"."""

    number: int
    unit: str
    limit: str = "exact"

    def score(self, text: str) -> float:
        """Return 1 if the text has the length, and less the farther it is from it, down to 0 for no text.
        The score is the smaller of the two numbers divided by the larger one."""
        found = self._count(text)
        if found == 0:
            return 0.0
        if (self.limit == "most" and found <= self.number) or (
            self.limit == "least" and found >= self.number
        ):
            return 1.0
        ratio = min(found, self.number) / max(found, self.number)
        is_rough = self.unit == "word" and self.limit == "exact"
        return min(1.0, ratio / WORD_TOLERANCE) if is_rough else ratio

    def _count(self, text: str) -> int:
        if self.unit == "item":
            return min(_item_counts(text), key=lambda count: abs(count - self.number))
        return _COUNTS[self.unit](text)


def asked_length(question: str) -> AskedLength | None:
    """Return the length that a question asks for; None if the question names no length."""
    for pattern in (_OF_TEXT, _OF_ITEMS):
        if found := pattern.search(question):
            said = found["number"].lower()
            number = int(said) if said.isdigit() else _NUMBERS.get(said, 1)  # "a sentence" is one
            limit = "most" if found["most"] else "least" if found["least"] else "exact"
            if 1 <= number <= MOST_ASKED:
                return AskedLength(number, _UNITS.get(found["unit"].lower(), "item"), limit)
    return None


def _count_sentences(text: str) -> int:
    ends = len(_SENTENCE_END.findall(text))
    rest = _SENTENCE_END.split(text)[-1].strip()
    return ends + bool(rest)


_COUNTS = {
    "word": lambda text: len(text.split()),
    "sentence": _count_sentences,
    "paragraph": lambda text: len([part for part in re.split(r"\n\s*\n", text) if part.strip()]),
    "line": lambda text: len([line for line in text.splitlines() if line.strip()]),
}


def _item_counts(text: str) -> list[int]:
    """Return the possible numbers of items of a text: the entries of its list; without a list, its lines, its
    sentences, and the parts of its longest enumeration."""
    if (entries := len(_ITEM.findall(text))) > 1:
        return [entries]
    parts = [len(_SEPARATOR.split(sentence.strip())) for sentence in _SENTENCE_END.split(text)]
    return [_COUNTS["line"](text), _count_sentences(text), max(parts)]
