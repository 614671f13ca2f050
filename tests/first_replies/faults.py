"""What is wrong with a reply to an ordinary question, counted without a judge."""

import re
from collections.abc import Callable

import py3langid

from .questions import Question

# Of these languages the model knows words; others would be found by chance in short texts.
py3langid.set_languages(["en", "fr", "es", "de", "it", "pt", "nl"])
_REFUSAL = re.compile(r"\b(i'?m sorry|i cannot|i can'?t|as an ai|i am unable|i'm not able)\b", re.IGNORECASE)
_RUN = 4  # words


def is_foreign(text: str) -> bool:
    """Is a reply to an English question in another language? A list of names has no language."""
    prose = [word for word in text.split() if word[:1].islower()]
    return len(prose) >= 3 and py3langid.classify(text)[0] != "en"


def is_loop(text: str) -> bool:
    """Do most runs of four words come more than once? Not the engine's rule, which this is to judge."""
    words = text.split() if " " in text.strip() else list(text)
    runs = [tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]
    return len(runs) > 40 and len(set(runs)) < len(runs) / 2


def faults(question: Question, text: str, finish_reason: str) -> set[str]:
    """Names of what is wrong, of FAULTS."""
    return {name for name, is_wrong in FAULTS.items() if is_wrong(question, text, finish_reason)}


FAULTS: dict[str, Callable[[Question, str, str], bool]] = {
    "language": lambda question, text, _: not question.foreign and is_foreign(text),
    "loop": lambda _, text, __: is_loop(text),
    "cut": lambda _, text, ended: ended == "length" and not is_loop(text),
    "empty": lambda _, text, __: not re.search(r"\w", text),
    "refusal": lambda _, text, __: bool(_REFUSAL.search(text)),
    "wrong": lambda question, text, _: (
        bool(question.answer) and not re.search(question.answer, text, re.IGNORECASE)
    ),
}
