"""This module draws tastes of simulated users at random. A taste is a set of weights of measurable properties
of a text: a user wants some of the properties and does not want others.

The properties are not the measures that the taste model (sona/taste.py) uses, so that the taste model does
not know a drawn taste in advance; but some properties, such as "uneven sentences", are near to a measure. No
part of the program was tuned on tastes with the properties of HELD_OUT. The results of these tastes are read
once, at the end.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Property = Callable[[str, str], float]  # question, text -> value

PROPERTIES: Mapping[str, Property] = {
    "length": lambda question, text: np.log(1 + len(text.split())),
    "first sentence": lambda question, text: len(re.split(r"[.!?\n]", text.strip())[0].split()),
    "word length": lambda question, text: len(re.sub(r"\W", "", text)) / (1 + len(text.split())),
    "commas": lambda question, text: _per_word(text, r","),
    "the": lambda question, text: _per_word(text, r"\bthe\b"),
    "and": lambda question, text: _per_word(text, r"\band\b"),
    "-ing": lambda question, text: _per_word(text, r"\w{2,}ing\b"),
    "-ly": lambda question, text: _per_word(text, r"\w{2,}ly\b"),
    "you": lambda question, text: _per_word(text, r"\byou"),
    "it": lambda question, text: _per_word(text, r"\b(?:it|this|that)\b"),
    "line breaks": lambda question, text: text.count("\n"),
    "numbered": lambda question, text: len(re.findall(r"^\s*\d+[.)]", text, re.MULTILINE)),
    "bold": lambda question, text: text.count("**"),
    "capitals": lambda question, text: _per_word(text, r"\b[A-Z]"),
    "echo": lambda question, text: _echo(question, text),
}
HELD_OUT: Mapping[str, Property] = {
    "sentence length": lambda question, text: float(np.mean(_sentences(text))),
    "uneven sentences": lambda question, text: float(np.std(_sentences(text))),
    "last sentence": lambda question, text: _sentences(text)[-1],
    "repeated words": lambda question, text: _repeated_share(text),
    "of": lambda question, text: _per_word(text, r"\bof\b"),
    "a": lambda question, text: _per_word(text, r"\ban?\b"),
    "to": lambda question, text: _per_word(text, r"\bto\b"),
    "can": lambda question, text: _per_word(text, r"\b(?:can|may|might|could|will|would|should)\b"),
    "not": lambda question, text: _per_word(text, r"\b(?:not?|never|without)\b|n['\u2019]t\b"),
    "-tion": lambda question, text: _per_word(text, r"\w(?:tion|ment|ness|ity)s?\b"),
    "-ed": lambda question, text: _per_word(text, r"\w{2,}ed\b"),
    "colons": lambda question, text: _per_word(text, r"[:;]"),
}
KNOWN = {**PROPERTIES, **HELD_OUT}
WANTED = 3  # the number of properties of a taste in `stars`


def _per_word(text: str, pattern: str) -> float:
    return len(re.findall(pattern, text, re.IGNORECASE if pattern.islower() else 0)) / (5 + len(text.split()))


def _echo(question: str, text: str) -> float:
    """Return about the share of a reply's words that are also in the question (the number of the reply's
    words is increased by 5). Only words of four or more letters are included."""
    asked, said = (re.findall(r"\w{4,}", t.lower()) for t in (question, text))
    return sum(word in set(asked) for word in said) / (5 + len(said))


def _sentences(text: str) -> list[int]:
    """Return the number of words in each sentence of a text; [0] for a text without words."""
    return [count for part in re.split(r"[.!?\n]+", text) if (count := len(part.split()))] or [0]


def _repeated_share(text: str) -> float:
    """Return the share of a text's words that occurred earlier in the text. Only words of four or more
    letters are included."""
    words = re.findall(r"\w{4,}", text.lower())
    return 1 - len(set(words)) / max(1, len(words))


@dataclass(frozen=True)
class DrawnTaste:
    """A taste over K properties.

    names: [K], the names of the properties in KNOWN
    weights: [K], above zero for a property that the user wants, below zero for a property that the user does
        not want
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]

    @classmethod
    def draw(cls, rng: np.random.Generator, properties: Sequence[str], wanted: int) -> "DrawnTaste":
        """Draw a taste of `wanted` properties, each with a weight from 0.5 to 1.5 or from -1.5 to -0.5."""
        names = tuple(str(name) for name in rng.choice(properties, wanted, replace=False))
        weights = rng.choice([-1.0, 1.0], wanted) * rng.uniform(0.5, 1.5, wanted)
        return cls(names, tuple(float(weight) for weight in weights))

    @property
    def words(self) -> str:
        """The taste in words, for example "+1.2 commas, -0.7 length"."""
        pairs = zip(self.names, self.weights, strict=True)
        return ", ".join(f"{weight:+.1f} {name}" for name, weight in pairs)

    def values(self, questions: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """Return the values of the K properties for each of R replies: [R, K]. questions, texts: the question
        and the text of each reply."""
        pairs = list(zip(questions, texts, strict=True))
        return np.array([[KNOWN[name](q, t) for name in self.names] for q, t in pairs], float)

    def score(self, values: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
        """Return the score of each of R replies: [R], sum_k weight_k (value_k - centre_k) / spread_k.

        values: [R, K], the values of the properties
        centre, spread: [K] (or centre [R, K]), the mean and the standard deviation of the properties in the
        replies with which a reply is compared
        """
        score = np.zeros(len(values))
        for k, weight in enumerate(self.weights):
            score += weight * (values - centre)[:, k] / spread[k]
        return score


def stars(seed: int, questions: Sequence[str], texts: Sequence[str]) -> tuple[str, np.ndarray]:
    """Draw a taste at random. Return the taste in words, and the stars [R] that a user with this taste gives
    to R replies. In these R replies, each number of stars from 1 to 5 is about equally frequent."""
    rng = np.random.default_rng([seed, 22])
    taste = DrawnTaste.draw(rng, list(PROPERTIES), WANTED)
    values = taste.values(questions, texts)
    score = taste.score(values, values.mean(axis=0), np.maximum(values.std(axis=0), 1e-9))
    return taste.words, in_fifths(score, fifths(score))


def fifths(score: np.ndarray) -> np.ndarray:
    """Return the four scores [4] that divide the scores of replies into five parts of equal size."""
    return np.quantile(score, [0.2, 0.4, 0.6, 0.8])


def in_fifths(score: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Return the stars [R], from 1 to 5, of R scores. cuts: [4], the result of `fifths`."""
    return 1 + np.searchsorted(cuts, score).astype(float)
