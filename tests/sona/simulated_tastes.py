"""Made-up replies whose measures vary, and people with a known taste who rate them: no model runs."""

from collections.abc import Callable

import numpy as np

from ruvmlx.sona.taste import PreferredFeatures, RatedFeatures
from ruvmlx.sona.taste_features import ReplyFeatures, features_of

OPENERS = ("How", "What", "Why")
TOPICS = ("bread", "rain", "chess", "trees", "shoes", "tea", "maps")
_SHORT = ["the", "cat", "for", "run", "to", "a", "red", "box", "and", "see", "it", "all", "in", "one", "day"]
_LONG = ["additional", "information", "concerning", "temperature", "requirements", "generally", "determines"]


def questions(count: int) -> list[str]:
    return [f"{OPENERS[i % 3]} about {TOPICS[i % len(TOPICS)]} {i}?" for i in range(count)]


def reply(rng: np.random.Generator) -> str:
    """A few sentences or list items: length, word length, speaking to the reader and a phrase all vary."""
    long, you, items = rng.random() * 0.6, rng.random() < 0.5, rng.random() < 0.4
    sentences = []
    for _ in range(rng.integers(1, 8)):
        words = [
            str(rng.choice(_LONG if rng.random() < long else _SHORT)) for _ in range(rng.integers(4, 12))
        ]
        if you:
            words.insert(2, "you")
        if rng.random() < 0.1:
            words.insert(1, "for example")
        sentences.append(("- " if items else "") + " ".join(words).capitalize() + ".")
    return ("\n" if items else " ").join(sentences)


Taste = Callable[[str, str], float]


def shorter(question: str, text: str) -> float:
    return 5 - len(text.split()) / 12


def lists(question: str, text: str) -> float:
    return 5 if text.startswith("- ") else 1


def to_the_reader(question: str, text: str) -> float:
    return 5 if " you " in text else 1


def phrase(question: str, text: str) -> float:
    return 5 if "for example" in text.lower() else 2


def lists_for_how(question: str, text: str) -> float:
    return lists(question, text) if question.startswith("How") else 6 - lists(question, text)


def texts(count: int, seed: int) -> list[tuple[str, str]]:
    """(question, reply)"""
    rng = np.random.default_rng(seed)
    return [(question, reply(rng)) for question in questions(count)]


def stars(taste: Taste, of: list[tuple[str, str]]) -> np.ndarray:
    return np.clip(np.round([taste(*pair) for pair in of]), 1, 5)


def pairs(taste: Taste, count: int, seed: int) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """(better, worse) replies to the same questions, where the taste tells them apart."""
    found = zip(texts(9 * count, seed), texts(9 * count, seed + 5000), strict=True)
    told = [(a, b) if taste(*a) > taste(*b) else (b, a) for a, b in found if taste(*a) != taste(*b)]
    return told[:count]


def preference_features(of: list[tuple[tuple[str, str], tuple[str, str]]]) -> list[PreferredFeatures]:
    return [PreferredFeatures(*features([better, worse])) for better, worse in of]


def features(of: list[tuple[str, str]]) -> list[ReplyFeatures]:
    return [features_of(question, text, True) for question, text in of]


def rating_features(of: list[tuple[str, str]], given: np.ndarray) -> list[RatedFeatures]:
    return [RatedFeatures(f, str(int(s))) for f, s in zip(features(of), given, strict=True)]
