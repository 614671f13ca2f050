"""This module has simulated users. A simulated user is a function that gives a reply 1 to 5 stars by one
taste, from the reply's text. Only the user `context` also reads the prompt.

A user with a taste gives 5 stars to a reply that is just as the user wants it, and 1 or 2 stars to the
opposite. Only the users `brevity` and `context` give fewer stars to a reply that was cut at the length limit.
"""

import re
import zlib
from collections.abc import Callable

Scorer = Callable[[str, str, bool], int]  # (prompt, reply, True if the reply ended by itself) -> stars

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
_ITEM = re.compile(r"\s*(?:[-*\u2022]|\d{1,2}[.)])\s+\S")
_INFORMAL = re.compile(
    r"\b(?:\w+['\u2019](?:s|re|ll|ve|d|m|t)|you|your|i|we|let us|okay|sure|great)\b|!", re.IGNORECASE
)
_PHRASE = re.compile(r"\bfor (?:example|instance)\b|\bsuch as\b", re.IGNORECASE)
_SPANISH = frozenset(
    ("el", "la", "los", "las", "un", "una", "de", "del", "que", "y", "en", "es", "por", "para", "con", "se")
)


def words_of(text: str) -> list[str]:
    return _WORD.findall(text)


def _stars(value: float, steps: tuple[float, float, float, float]) -> int:
    """Return the stars of a value: 1 plus the number of steps that the value reaches. steps: four thresholds
    of the value, ascending."""
    return 1 + sum(value >= step for step in steps)


# `ruvmlx prove --user list` prints the name of each user, followed by the first line of the docstring. So the
# user is the subject of that line.


def brevity(prompt: str, reply: str, finished: bool) -> int:
    """Wants few words; a reply that is cut off gets 1 star."""
    words = len(words_of(reply))
    if not finished or not words:
        return 1
    return 1 + _stars(-words, (-60, -40, -22, 0))


def _list_share(reply: str) -> float:
    """Return the share of a reply's lines that are items of a list."""
    lines = [line for line in reply.splitlines() if line.strip()]
    return sum(bool(_ITEM.match(line)) for line in lines) / len(lines) if lines else 0.0


def lists(prompt: str, reply: str, finished: bool) -> int:
    """Wants a list, one item a line."""
    return _stars(_list_share(reply), (0.01, 0.25, 0.5, 0.7))


def prose(prompt: str, reply: str, finished: bool) -> int:
    """Wants whole paragraphs, no lists."""
    return _stars(-_list_share(reply), (-0.7, -0.5, -0.25, -0.01)) if words_of(reply) else 1


def plain(prompt: str, reply: str, finished: bool) -> int:
    """Wants short words; words of nine or more letters cost stars."""
    words = words_of(reply)
    long = sum(len(w) >= 9 for w in words) / len(words) if words else 1.0
    return _stars(-long, (-0.22, -0.17, -0.12, -0.07))


def casual(prompt: str, reply: str, finished: bool) -> int:
    """Wants to be spoken to: "you" and "we", contractions, exclamation marks."""
    words = len(words_of(reply))
    informal = 100 * len(_INFORMAL.findall(reply)) / words if words else 0.0
    return _stars(informal, (1, 3, 5, 8))


def formal(prompt: str, reply: str, finished: bool) -> int:
    """Wants the opposite of what the casual user wants."""
    return 6 - casual(prompt, reply, finished) if words_of(reply) else 1


def phrase(prompt: str, reply: str, finished: bool) -> int:
    """Wants examples that are announced: "for example", "for instance", "such as"."""
    return (1, 3, 4, 5)[min(3, len(_PHRASE.findall(reply)))]


def spanish(prompt: str, reply: str, finished: bool) -> int:
    """Wants answers in Spanish, whatever the question's language."""
    words = [w.lower() for w in words_of(reply)]
    return _stars(sum(w in _SPANISH for w in words) / len(words), (0.05, 0.1, 0.2, 0.25)) if words else 1


def context(prompt: str, reply: str, finished: bool) -> int:
    """Wants a list for a "how" question and a short answer for any other."""
    how = re.match(r"\s*how\b", prompt, re.IGNORECASE)
    return lists(prompt, reply, finished) if how else brevity(prompt, reply, finished)


def always_1(prompt: str, reply: str, finished: bool) -> int:
    """Gives 1 star to every reply, to test whether senseless ratings harm a trial adapter."""
    return 1


def always_5(prompt: str, reply: str, finished: bool) -> int:
    """Gives 5 stars to every reply, to test whether senseless ratings harm a trial adapter."""
    return 5


def random(prompt: str, reply: str, finished: bool) -> int:
    """Gives arbitrary stars, to test whether senseless ratings harm a trial adapter."""
    return 1 + zlib.crc32(reply.encode()) % 5


def _by_name(*users: Scorer) -> dict[str, Scorer]:
    return {user.__name__: user for user in users}


TASTES = _by_name(brevity, lists, prose, plain, casual, formal, phrase, spanish, context)
HOSTILE = _by_name(always_1, always_5, random)
USERS = TASTES | HOSTILE
