"""Measures of a reply's text for which people have words: its length, its lists, how it speaks to the reader.

Each measure is one number, scaled so that replies of one model to one question differ by about 1. The taste
model (taste.py) learns which measures a user likes and says so with the words given here.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_SENTENCE = re.compile(r"[.!?\u2026\u3002]+(?=[\s\"')\u201d\u2019*]|$)|\n+")
_ITEM = re.compile(r"\s*(?:[-*+\u2022]|\d{1,2}[.)])\s+\S")
_HEADING = re.compile(r"\s*(?:#{1,6}\s+\S|\*\*[^*]+\*\*:?\s*$|[^.!?]{1,60}:\s*$)")
_CONTRACTION = re.compile(r"\w['\u2019](?:s|re|ll|ve|d|m|t)\b", re.IGNORECASE)
_CODE = re.compile(r"```|`[^`\n]+`|^(?: {4}|\t)\S|[{};]\s*$", re.MULTILINE)
_NUMBER = re.compile(r"\d+(?![.)]\s)")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z]\w*")
_HEDGE = frozenset(
    (
        "may",
        "might",
        "could",
        "perhaps",
        "possibly",
        "probably",
        "maybe",
        "likely",
        "usually",
        "often",
        "generally",
    )
)
_YOU = frozenset(["you", "your", "yours", "yourself"])
_I = frozenset(["i", "me", "my", "mine", "i'm", "i've", "i'd", "i'll"])
_WE = frozenset(["we", "us", "our", "ours", "let's", "we're", "we've", "we'll"])


@dataclass(frozen=True)
class ReplyText:
    """A reply's text, divided into the parts that the measures count."""

    text: str
    finished: bool

    @cached_property
    def words(self) -> list[str]:
        return [w.lower().replace("\u2019", "'") for w in _WORD.findall(self.text)]

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]

    @cached_property
    def sentences(self) -> int:
        return max(1, sum(1 for s in _SENTENCE.split(self.text) if _WORD.search(s)))

    def share(self, count: float) -> float:
        """Return the square root of a count per 100 words. Its sampling error is about the same for rare and
        common things. Ten words are added, so that a reply of few words is near the average."""
        return math.sqrt(100 * count / (len(self.words) + 10))

    def share_of(self, wanted: frozenset[str]) -> float:
        return self.share(sum(w in wanted for w in self.words))

    def of_lines(self, pattern: re.Pattern[str]) -> float:
        return sum(bool(pattern.match(line)) for line in self.lines) / max(1, len(self.lines))

    def count(self, characters: str) -> int:
        return sum(self.text.count(c) for c in characters)


@dataclass(frozen=True)
class Measure:
    """One measure.

    more, less: what a user likes if their ratings rise, or fall, with the measure
    usual: the mean over replies (starter model)
    spread: the standard deviation among replies to one question (starter model)
    by_word: whether a word or a mark changes it at any place; other measures are of the reply's structure
    """

    more: str
    less: str
    of: Callable[[ReplyText], float]
    usual: float = 0.0
    spread: float = 1.0
    by_word: bool = True


def _mean_length(t: ReplyText) -> float:
    return (sum(map(len, t.words)) + 45) / (len(t.words) + 10)


def _variety(t: ReplyText) -> float:
    return (len(set(t.words)) + 8) / math.sqrt(len(t.words) + 10)


def _capitals(t: ReplyText) -> float:
    return t.share(len(_NAME.findall(t.text)))


_NAMED = (
    Measure("longer replies", "shorter replies", lambda t: math.log(len(t.words) + 5), 4.36, 0.25,
            by_word=False),
    Measure("complete replies", "replies that go on", lambda t: float(t.finished), 0.05, 0.20,
            by_word=False),
    Measure("longer sentences", "shorter sentences",
            lambda t: math.log((len(t.words) + 15) / (t.sentences + 1)), 2.66, 0.20, by_word=False),
    Measure("longer words", "shorter words", _mean_length, 4.59, 0.28),
    Measure("more long words", "fewer long words",
            lambda t: t.share(sum(len(w) >= 8 for w in t.words)), 3.44, 0.59),
    Measure("lists", "no lists", lambda t: t.of_lines(_ITEM), 0.15, 0.23, by_word=False),
    Measure("more paragraphs", "fewer paragraphs", lambda t: math.log(1 + len(t.lines)), 1.19, 0.27,
            by_word=False),
    Measure("headings", "no headings", lambda t: t.of_lines(_HEADING), 0.02, 0.20, by_word=False),
    Measure("contractions", "no contractions",
            lambda t: t.share(len(_CONTRACTION.findall(t.text))), 1.17, 0.70),
    Measure("more 'you'", "less 'you'", lambda t: t.share_of(_YOU), 1.24, 0.66),
    Measure("more 'I'", "less 'I'", lambda t: t.share_of(_I), 0.18, 0.46),
    Measure("more 'we'", "less 'we'", lambda t: t.share_of(_WE), 0.07, 0.25),
    Measure("exclamation marks", "no exclamation marks", lambda t: t.share(t.count("!")), 0.03, 0.20),
    Measure("questions back", "no questions back", lambda t: t.share(t.count("?")), 0.03, 0.20),
    Measure("more numbers", "fewer numbers", lambda t: t.share(len(_NUMBER.findall(t.text))), 0.23, 0.58),
    Measure("more names", "fewer names", _capitals, 0.55, 0.71, by_word=False),
    Measure("more commas", "fewer commas", lambda t: t.share(t.count(",;")), 2.20, 0.59),
    Measure("more brackets and quotes", "fewer brackets and quotes", lambda t: t.share(t.count('("\u201c')),
            0.24, 0.54),
    Measure("bold or italic text", "no bold or italic text", lambda t: t.share(t.count("*_")), 0.45, 0.94,
            by_word=False),
    Measure("code", "no code", lambda t: t.share(len(_CODE.findall(t.text))), 0.00, 0.20,
            by_word=False),
    Measure("more varied words", "more repeated words", _variety, 6.23, 0.52, by_word=False),
    Measure("more caution", "less caution", lambda t: t.share_of(_HEDGE), 0.28, 0.45),
    Measure("more letters beyond ASCII", "fewer letters beyond ASCII",
            lambda t: t.share(sum(ord(c) > 127 and c.isalpha() for c in t.text)), 0.00, 0.20),
)  # fmt: skip


# Words that every English reply has. Their rates show styles. The spread is twice the spread among replies to
# one question, so that all of them together do not outweigh the measures above.
_COMMON = (
    ("the", 1.73, 1.38),
    ("of", 1.43, 1.30),
    ("and", 1.51, 1.14),
    ("to", 1.57, 1.13),
    ("a", 2.27, 1.07),
    ("in", 0.74, 1.15),
    ("is", 1.09, 1.21),
    ("it", 0.54, 1.18),
    ("for", 0.69, 1.12),
    ("that", 0.79, 1.21),
    ("with", 0.55, 1.17),
    ("on", 0.25, 0.86),
    ("as", 0.46, 1.17),
    ("are", 0.40, 1.07),
    ("this", 0.46, 1.05),
    ("be", 0.55, 1.14),
)


def _common(word: str, usual: float, spread: float) -> Measure:
    wanted = frozenset((word,))
    return Measure(f"more '{word}'", f"less '{word}'", lambda t: t.share_of(wanted), usual, spread)


NAMED = len(_NAMED)  # the first measures; the others are candidates as words, not as measures
MEASURES = (*_NAMED, *(_common(*word) for word in _COMMON))


def measure_text(text: str, finished: bool) -> np.ndarray:
    """Return [M] float32: every measure of a reply. 0 is the value of a usual reply."""
    reply = ReplyText(text, finished)
    return np.array([(m.of(reply) - m.usual) / m.spread for m in MEASURES], np.float32)
