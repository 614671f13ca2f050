"""Users drawn at random: each wants some properties of a text more and others less.

The properties are defined here and not by the taste model's own measures, so that a drawn user is not known
to it in advance. Tuning never sees them; results are read once, at the end.
"""

import re
from collections.abc import Sequence

import numpy as np

PROPERTIES = {
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
WANTED = 3  # properties of one user


def _per_word(text: str, pattern: str) -> float:
    return len(re.findall(pattern, text, re.IGNORECASE if pattern.islower() else 0)) / (5 + len(text.split()))


def _echo(question: str, text: str) -> float:
    """Share of the reply's words that are in the question."""
    asked, said = (re.findall(r"\w{4,}", t.lower()) for t in (question, text))
    return sum(word in set(asked) for word in said) / (5 + len(said))


def stars(seed: int, questions: Sequence[str], texts: Sequence[str]) -> tuple[str, np.ndarray]:
    """(the taste in words, stars [R]) of a user for these replies: as many get 1 star as 2, 3, 4 or 5."""
    rng = np.random.default_rng([seed, 22])
    names = [str(name) for name in rng.choice(list(PROPERTIES), WANTED, replace=False)]
    weights = rng.choice([-1.0, 1.0], WANTED) * rng.uniform(0.5, 1.5, WANTED)
    score = np.zeros(len(texts))
    for name, weight in zip(names, weights, strict=True):
        values = np.array([PROPERTIES[name](q, t) for q, t in zip(questions, texts, strict=True)], float)
        score += weight * (values - values.mean()) / max(values.std(), 1e-9)
    words = ", ".join(f"{weight:+.1f} {name}" for name, weight in zip(names, weights, strict=True))
    return words, 1 + np.searchsorted(np.quantile(score, [0.2, 0.4, 0.6, 0.8]), score).astype(float)
