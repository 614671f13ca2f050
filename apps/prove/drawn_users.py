"""Simulated users drawn from a space of tastes, and how each of them rates.

A taste gives weights, above or below zero, to two to five properties of a text (drawn_tastes.py). About one
user in three has two tastes: one for questions about what the reader does ("How do I ..."), one for all
others. Stars compare a reply with the untouched model's replies to the same question, so that each number of
stars, 1 to 5, is about equally frequent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .drawn_tastes import HELD_OUT, PROPERTIES, DrawnTaste, fifths, in_fifths
from .raters import RATERS

FLIPPED = 0.2  # share of a noisy rater's ratings that are reversed: 6 - stars
MIN_PROPERTIES, MAX_PROPERTIES = 2, 5  # properties of one taste
BY_TOPIC = 1 / 3  # share of users with two tastes

_DOING = re.compile(r"\b(?:I|my|me)\b")


@dataclass(frozen=True)
class DrawnUser:
    """tastes: one; or two, for questions about what the reader does and for all others. rater: of RATERS."""

    number: int
    held_out: bool
    rater: str
    tastes: tuple[DrawnTaste, ...]

    @classmethod
    def draw(
        cls, number: int, held_out: bool, rater: str | None = None, family: Sequence[str] = ()
    ) -> "DrawnUser":
        """The user with this number. held_out: draw from HELD_OUT, not PROPERTIES. rater: None draws it.
        family: other properties to draw from, of KNOWN."""
        rng = np.random.default_rng([number, 23, int(held_out)])
        family = family or list(HELD_OUT if held_out else PROPERTIES)
        drawn = str(rng.choice(list(RATERS), p=list(RATERS.values())))
        count = 2 if rng.random() < BY_TOPIC else 1
        tastes = [
            DrawnTaste.draw(rng, family, int(rng.integers(MIN_PROPERTIES, MAX_PROPERTIES + 1)))
            for _ in range(count)
        ]
        return cls(number, held_out, rater or drawn, tuple(tastes))

    @property
    def family(self) -> str:
        return "held-out" if self.held_out else "tuning"

    @property
    def kind(self) -> str:
        return "by topic" if len(self.tastes) > 1 else "mixed"

    @property
    def words(self) -> str:
        return "; else ".join(taste.words for taste in self.tastes)

    def taste_for(self, question: str) -> DrawnTaste:
        return self.tastes[0] if _DOING.search(question) else self.tastes[-1]

    def rating(self, stars: int, rng: np.random.Generator) -> str | None:
        """What this user presses for a reply worth so many stars; None: nothing."""
        if self.rater == "stars":
            return str(stars)
        if self.rater == "noisy":
            return str(6 - stars if rng.random() < FLIPPED else stars)
        up = stars >= 4 and self.rater != "only-down"
        down = stars <= 2 and self.rater != "only-up"
        return "up" if up else "down" if down else None


class DrawnStars:
    """A drawn user's stars for replies to known questions. A Scorer, as in users.py."""

    def __init__(self, user: DrawnUser, frozen: Mapping[str, Sequence[str]]):
        """frozen: the untouched model's replies to each question that will be asked."""
        self._user, self._centre = user, dict[str, np.ndarray]()
        self._scale: dict[DrawnTaste, tuple[np.ndarray, np.ndarray]] = {}  # spread [K], cuts [4]
        for taste in user.tastes:
            values = {
                q: taste.values([q] * len(t), t) for q, t in frozen.items() if user.taste_for(q) is taste
            }
            if values:
                self._measure(taste, values)

    def _measure(self, taste: DrawnTaste, values: Mapping[str, np.ndarray]) -> None:
        """values: [R, K] of each question. The scale is that of differences between replies to one
        question."""
        self._centre |= {question: v.mean(axis=0) for question, v in values.items()}
        differences = np.concatenate([v - self._centre[question] for question, v in values.items()])
        spread = differences.std(axis=0)
        spread[spread < 1e-9] = np.inf  # a property that never varies counts nothing
        self._scale[taste] = spread, fifths(taste.score(differences, np.zeros_like(spread), spread))

    def __call__(self, prompt: str, reply: str, finished: bool) -> int:
        taste = self._user.taste_for(prompt)
        spread, cuts = self._scale[taste]
        score = taste.score(taste.values([prompt], [reply]), self._centre[prompt], spread)
        return int(in_fifths(score, cuts)[0])
