"""This module measures a reply's text by numbers for which people have words, such as the text's length or
its number of lists.

Each measure is one number. The measure is scaled so that its standard deviation among the starter model's
replies to one question is about 1. The taste model (taste.py) learns which measures a user likes, and tells
the user so with the words of this module.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
# The search begins only at the first mark of a row of marks. Without this condition, its time would grow with
# the square of the row's length.
_SENTENCE = re.compile(r"(?<![.!?\u2026\u3002])[.!?\u2026\u3002]+(?=[\s\"')\u201d\u2019*]|$)|\n+")
_ITEM = re.compile(r"\s*(?:[-*+\u2022]|\d{1,2}[.)])\s+\S")
_HEADING = re.compile(r"\s*(?:#{1,6}\s+\S|\*\*[^*]+\*\*:?\s*$|[^.!?]{1,60}:\s*$)")
_CONTRACTION = re.compile(r"\w['\u2019](?:s|re|ll|ve|d|m|t)\b", re.IGNORECASE)
_CODE = re.compile(r"```|`[^`\n]+`|^(?: {4}|\t)\S|[{};]\s*$", re.MULTILINE)
_NUMBER = re.compile(r"\d+(?![.)]\s)")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z]\w*")


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


@dataclass(frozen=True)
class ReplyText:
    """A reply's text with its parts (words, lines, sentences), which the measures count."""

    text: str
    finished: bool

    @cached_property
    def words(self) -> list[str]:
        return [w.lower().replace("\u2019", "'") for w in _WORD.findall(self.text)]

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]

    @cached_property
    def sentence_lengths(self) -> list[int]:
        """The number of words of each sentence that has words; [0] for a text without words."""
        counts = (len(_WORD.findall(sentence)) for sentence in _SENTENCE.split(self.text))
        return [count for count in counts if count] or [0]

    def share(self, count: float) -> float:
        """Return the square root of the rate of a part of the text: its count per 100 words. The square root
        of a rate has about the same sampling error for rare and for common parts. Ten is added to the number
        of the text's words, so that the rate of a short text is not extreme."""
        return math.sqrt(100 * count / (len(self.words) + 10))

    def share_of(self, wanted: frozenset[str]) -> float:
        return self.share(sum(w in wanted for w in self.words))

    def share_ending(self, ending: re.Pattern[str]) -> float:
        return self.share(sum(bool(ending.search(w)) for w in self.words))

    def of_lines(self, pattern: re.Pattern[str]) -> float:
        return sum(bool(pattern.match(line)) for line in self.lines) / max(1, len(self.lines))

    def count(self, characters: str) -> int:
        return sum(self.text.count(c) for c in characters)


@dataclass(frozen=True)
class Measure:
    """A measure of a reply's text.

    more, less: words for what the user likes: `more` if the user's ratings rise with the measure, `less` if
        they fall
    of: the function that measures a text
    usual: the mean of the measure over replies of the starter model
    spread: the measure's standard deviation among the starter model's replies to one question
    by_word: True if a word or a punctuation mark changes the measure at any place in the text; False if the
        measure depends on the reply's structure
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


def _unevenness(t: ReplyText) -> float:
    """Return the standard deviation of the sentences' lengths in words, divided by their mean plus 5. Without
    the 5, a text of very short sentences would get a large result for small differences."""
    mean = sum(t.sentence_lengths) / len(t.sentence_lengths)
    square = sum((length - mean) ** 2 for length in t.sentence_lengths) / len(t.sentence_lengths)
    return math.sqrt(square) / (mean + 5)


def _first_line(t: ReplyText) -> float:
    return math.log(3 + len(_WORD.findall(t.lines[0]))) if t.lines else 0.0


_NEGATIONS = _set_of("not no never without none nothing nor")


def _negations(t: ReplyText) -> float:
    return t.share(sum(w in _NEGATIONS or w.endswith("n't") for w in t.words))


def _words(more: str, less: str, words: str, usual: float, spread: float) -> Measure:
    wanted = _set_of(words)
    return Measure(more, less, lambda t: t.share_of(wanted), usual, spread)


def _marks(more: str, less: str, marks: str, usual: float, spread: float) -> Measure:
    return Measure(more, less, lambda t: t.share(t.count(marks)), usual, spread)


def _endings(more: str, less: str, ending: str, usual: float, spread: float) -> Measure:
    pattern = re.compile(ending)
    return Measure(more, less, lambda t: t.share_ending(pattern), usual, spread)


_NAMED = (
    Measure("longer replies", "shorter replies", lambda t: math.log(len(t.words) + 5), 4.37, 0.25,
            by_word=False),
    Measure("complete replies", "replies that go on", lambda t: float(t.finished), 0.09, 0.23,
            by_word=False),
    Measure("longer sentences", "shorter sentences",
            lambda t: math.log((len(t.words) + 15) / (len(t.sentence_lengths) + 1)), 2.71, 0.20,
            by_word=False),
    Measure("longer words", "shorter words", _mean_length, 4.72, 0.28),
    Measure("more long words", "fewer long words",
            lambda t: t.share(sum(len(w) >= 8 for w in t.words)), 3.69, 0.62),
    Measure("lists", "no lists", lambda t: t.of_lines(_ITEM), 0.08, 0.20, by_word=False),
    Measure("more paragraphs", "fewer paragraphs", lambda t: math.log(1 + len(t.lines)), 1.09, 0.28,
            by_word=False),
    Measure("headings", "no headings", lambda t: t.of_lines(_HEADING), 0.01, 0.10, by_word=False),
    Measure("contractions", "no contractions",
            lambda t: t.share(len(_CONTRACTION.findall(t.text))), 1.22, 0.72),
    _words("more 'you'", "less 'you'", "you your yours yourself", 0.90, 0.66),
    _words("more 'I'", "less 'I'", "i me my mine i'm i've i'd i'll", 0.29, 0.56),
    _words("more 'we'", "less 'we'", "we us our ours let's we're we've we'll", 0.14, 0.40),
    _marks("exclamation marks", "no exclamation marks", "!", 0.04, 0.21),
    _marks("questions back", "no questions back", "?", 0.08, 0.33),
    Measure("more numbers", "fewer numbers", lambda t: t.share(len(_NUMBER.findall(t.text))), 0.18, 0.48),
    Measure("more names", "fewer names", _capitals, 0.60, 0.70, by_word=False),
    _marks("more commas", "fewer commas", ",;", 2.21, 0.63),
    _marks("more brackets and quotes", "fewer brackets and quotes", '("\u201c', 0.34, 0.68),
    Measure("bold or italic text", "no bold or italic text", lambda t: t.share(t.count("*_")), 0.22, 0.74,
            by_word=False),
    Measure("code", "no code", lambda t: t.share(len(_CODE.findall(t.text))), 0.00, 0.20,
            by_word=False),
    Measure("more varied words", "more repeated words", _variety, 6.31, 0.57, by_word=False),
    _words("more caution", "less caution",
           "may might could perhaps possibly probably maybe likely usually often generally", 0.33, 0.49),
    Measure("more letters beyond ASCII", "fewer letters beyond ASCII",
            lambda t: t.share(sum(ord(c) > 127 and c.isalpha() for c in t.text)), 0.01, 0.20),
    Measure("a longer first sentence", "a shorter first sentence",
            lambda t: math.log(3 + t.sentence_lengths[0]), 2.89, 0.36, by_word=False),
    Measure("a longer last sentence", "a shorter last sentence",
            lambda t: math.log(3 + t.sentence_lengths[-1]), 2.53, 0.58, by_word=False),
    Measure("long sentences here and there", "no very long sentence",
            lambda t: math.log(3 + max(t.sentence_lengths)), 3.27, 0.21, by_word=False),
    Measure("sentences of uneven length", "sentences of even length", _unevenness, 0.28, 0.12, by_word=False),
    Measure("a longer first paragraph", "a shorter first paragraph", _first_line, 3.95, 0.40, by_word=False),
    Measure("more short words", "fewer short words",
            lambda t: t.share(sum(len(w) <= 3 for w in t.words)), 5.84, 0.48),
    _endings("more words with -ing", "fewer words with -ing", r"\w{2}ing$", 1.67, 0.66),
    _endings("more words with -ly", "fewer words with -ly", r"\w{2}ly$", 0.74, 0.64),
    _endings("more words with -ed", "fewer words with -ed", r"\w{2}ed$", 1.18, 0.70),
    _endings("more abstract nouns", "fewer abstract nouns",
             r"\w(?:tion|sion|ment|ness|ity|ance|ence)s?$", 1.57, 0.66),
    _endings("more adjectives", "fewer adjectives", r"\w(?:able|ible|ful|less|ous|ive|al|ic)$", 1.64, 0.70),
    _words("more 'he', 'she' and 'they'", "less 'he', 'she' and 'they'",
           "he she they them his her him their", 0.48, 0.55),
    _words("more 'can', 'will' and 'must'", "less 'can', 'will' and 'must'",
           "can may might could will would should must", 0.90, 0.63),
    Measure("more 'not' and 'no'", "less 'not' and 'no'", _negations, 0.46, 0.58),
    _words("more 'is' and 'are'", "less 'is' and 'are'", "am is are was were be been being", 1.78, 0.59),
    _words("more 'but' and 'however'", "less 'but' and 'however'",
           "but however although though while yet instead", 0.49, 0.55),
    _words("more reasons ('because')", "fewer reasons ('because')",
           "because so since therefore thus hence", 0.12, 0.35),
    _words("more emphasis ('very')", "less emphasis ('very')", "very really quite just so too much more most",
           0.48, 0.58),
    _words("more praise ('great')", "less praise ('great')",
           "good great best better nice wonderful amazing beautiful important", 0.32, 0.48),
    _words("more examples ('for example')", "fewer examples ('for example')", "like such example instance",
           0.27, 0.50),
    _words("more order in time ('then')", "less order in time ('then')",
           "then first next finally now when after before", 0.46, 0.54),
    _marks("more colons", "fewer colons", ":", 0.39, 0.58),
    _marks("more dashes", "fewer dashes", "-\u2013\u2014", 0.51, 0.68),
    _marks("more quotes", "fewer quotes", '"\u201c', 0.28, 0.65),
)  # fmt: skip


# Nearly every English reply has some of these words. The rates of these words show the style of a text. A row
# is (word, `Measure.usual`, `Measure.spread`).
_COMMON = (
    ("the", 1.91, 0.65),
    ("of", 1.46, 0.61),
    ("and", 1.51, 0.57),
    ("to", 1.63, 0.60),
    ("a", 2.17, 0.57),
    ("in", 0.76, 0.62),
    ("is", 1.22, 0.65),
    ("it", 0.57, 0.62),
    ("for", 0.54, 0.57),
    ("that", 0.96, 0.63),
    ("with", 0.62, 0.61),
    ("on", 0.34, 0.54),
    ("as", 0.44, 0.57),
    ("are", 0.41, 0.53),
    ("this", 0.47, 0.55),
    ("be", 0.50, 0.56),
)


def _common(word: str, usual: float, spread: float) -> Measure:
    wanted = frozenset((word,))
    return Measure(f"more '{word}'", f"less '{word}'", lambda t: t.share_of(wanted), usual, spread)


NAMED = len(_NAMED)  # the number of measures before the rates of common words
MEASURES = (*_NAMED, *(_common(*word) for word in _COMMON))


def measure_text(text: str, finished: bool) -> np.ndarray:
    """Return all M measures of a reply's text: [M] float32. A measure is 0 if it has its mean over the
    starter model's replies (`Measure.usual`). finished: True if the reply ended by itself."""
    reply = ReplyText(text, finished)
    return np.array([(m.of(reply) - m.usual) / m.spread for m in MEASURES], np.float32)
