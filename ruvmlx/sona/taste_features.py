"""This module computes the features of a reply. The taste model (taste.py) knows only these features:
measures of the reply's text, the reply's words, and the first word of its question.

The features are computed only from the question, the reply's text, and whether the reply ended by itself. So
the module can also compute features of an edited or imported reply.
"""

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .taste_measures import MEASURES, measure_text

BUCKETS = 1 << 16  # the number of hashes of words and pairs of words: a hash has 16 bits
_TOKEN = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*|\d+|[^\w\s]")
_MAX_COUNT = 255  # the maximum count of a word, because a count is one byte
_HEAD = 6  # bytes before the measures of encoded features: the opener, M and W
_WORDS_AT = _HEAD + 4 * len(MEASURES)  # bytes before the hashes of encoded features


@dataclass(frozen=True, slots=True)
class ReplyFeatures:
    """The features of one reply, as the store has them: 4 M + 3 W + 6 bytes, which is less than 1 kB for 100
    words. The object has no arrays of its own, because the objects of three arrays take over 1 kB in addition
    to the numbers. Each property that is an array is a view of the bytes.

    data: as `of` encodes the features
    """

    data: bytes

    @classmethod
    def of(
        cls, measures: np.ndarray, words: np.ndarray, counts: np.ndarray, opener: int = 0
    ) -> "ReplyFeatures":
        """Encode the opener, the measures, the hashes and the counts, little-endian. The arguments are as the
        properties below."""
        head = np.array([opener, len(measures), len(words)], "<u2").tobytes()
        return cls(
            head
            + measures.astype("<f4").tobytes()
            + words.astype("<u2").tobytes()
            + counts.astype("u1").tobytes()
        )

    @classmethod
    def from_bytes(cls, data: bytes | None) -> "ReplyFeatures | None":
        """Return stored features. Return None if there are no features, or if a version of the program with
        other measures stored them; the caller then computes the features again."""
        if data is None or len(data) < _HEAD:
            return None
        _, measures, words = np.frombuffer(data, "<u2", 3).tolist()
        if measures != len(MEASURES) or len(data) != _WORDS_AT + 3 * words:
            return None
        return cls(data)

    def with_measures(self, measures: np.ndarray) -> "ReplyFeatures":
        """Return the features with other measures [M]."""
        return ReplyFeatures(self.data[:_HEAD] + measures.astype("<f4").tobytes() + self.data[_WORDS_AT:])

    @property
    def word_count(self) -> int:
        """W, the number of different words and pairs of words."""
        return (len(self.data) - _WORDS_AT) // 3

    @property
    def opener(self) -> int:
        """The hash of the question's first word."""
        return int.from_bytes(self.data[:2], "little")

    @property
    def measures(self) -> np.ndarray:
        """The M measures of the text (taste_measures.py): [M] float32."""
        return np.frombuffer(self.data, "<f4", len(MEASURES), _HEAD)

    @property
    def words(self) -> np.ndarray:
        """The hashes of the reply's words and pairs of words, ascending: [W] uint16."""
        return np.frombuffer(self.data, "<u2", self.word_count, _WORDS_AT)

    @property
    def counts(self) -> np.ndarray:
        """The number of times that the reply has each word or pair: [W] uint8."""
        return np.frombuffer(self.data, "u1", self.word_count, _WORDS_AT + 2 * self.word_count)


@dataclass(frozen=True)
class ReplyTable:
    """The features of R replies in five arrays. A list of `ReplyFeatures` has thousands of small arrays, and
    these arrays would split the free memory of a server into many small parts.

    measures: [R, M], the measures of each reply
    words, counts: [W], the hashes and counts of the first reply's words, then of the second reply's words ...
    sizes: [R], the number of words and pairs of words of each reply
    openers: [R], the hash of the first word of each reply's question
    """

    measures: np.ndarray
    words: np.ndarray
    counts: np.ndarray
    sizes: np.ndarray
    openers: np.ndarray

    @classmethod
    def of(cls, replies: "Sequence[ReplyFeatures] | ReplyTable") -> "ReplyTable":
        if isinstance(replies, ReplyTable):
            return replies
        measures = b"".join(r.data[_HEAD:_WORDS_AT] for r in replies)
        words = b"".join(r.data[_WORDS_AT : _WORDS_AT + 2 * r.word_count] for r in replies)
        counts = b"".join(r.data[_WORDS_AT + 2 * r.word_count :] for r in replies)
        return cls(
            np.frombuffer(measures, "<f4").reshape(-1, len(MEASURES)),
            np.frombuffer(words, "<u2"),
            np.frombuffer(counts, "u1"),
            np.array([r.word_count for r in replies], np.int64),
            np.array([r.opener for r in replies], np.int64),
        )

    def __len__(self) -> int:
        return len(self.openers)

    def part(self, part: slice) -> "ReplyTable":
        """Return the replies with the indices of a slice that has no step."""
        start, stop, _ = part.indices(len(self))
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        words = slice(ends[start], ends[max(start, stop)])
        return ReplyTable(
            self.measures[part], self.words[words], self.counts[words], self.sizes[part], self.openers[part]
        )

    def __add__(self, other: "ReplyTable") -> "ReplyTable":
        parts = {name: np.concatenate([part, vars(other)[name]]) for name, part in vars(self).items()}
        return ReplyTable(**parts)


def features_of(question: str, text: str, finished: bool) -> ReplyFeatures:
    """Return the features of a reply. finished: True if the reply ended by itself, not at the length
    limit."""
    counted = Counter(bucket(gram) for gram in grams(text))
    words = np.array(sorted(counted), np.uint16)
    counts = np.array([min(counted[int(w)], _MAX_COUNT) for w in words], np.uint8)
    return ReplyFeatures.of(measure_text(text, finished), words, counts, bucket(opener_of(question)))


def grams(text: str) -> list[str]:
    """Return the words, numbers and punctuation marks of a text in lower case, and each pair of neighbours
    among them."""
    tokens = _TOKEN.findall(text.lower().replace("\u2019", "'"))
    return tokens + [f"{a} {b}" for a, b in itertools.pairwise(tokens)]


def opener_of(question: str) -> str:
    """Return the question's first word, number or mark, in lower case; "" if there is none."""
    found = _TOKEN.search(question)
    return found.group().lower() if found else ""


def bucket(gram: str) -> int:
    return zlib.crc32(gram.encode()) % BUCKETS
