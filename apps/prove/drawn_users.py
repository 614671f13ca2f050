"""This module draws simulated users at random. A user has a taste, or two tastes, and a way to rate
(raters.py).

A taste gives weights, above or below zero, to two to five properties of a text (drawn_tastes.py). About one
user in three has two tastes: one for questions with "I", "me" or "my" ("How do I ..."), and one for all other
questions. The stars of a reply come from a comparison with the untouched model's replies to the same
question. So each number of stars, 1 to 5, is about equally frequent among the untouched model's replies.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .drawn_tastes import HELD_OUT, PROPERTIES, DrawnTaste, fifths, in_fifths
from .raters import RATERS

FLIPPED = 0.2  # the probability that a noisy user reverses a rating to 6 - stars
MIN_PROPERTIES, MAX_PROPERTIES = 2, 5  # the minimum and the maximum number of properties of a taste
BY_TOPIC = 1 / 3  # the share of users with two tastes

_DOING = re.compile(r"\b(?:I|my|me)\b")


@dataclass(frozen=True)
class DrawnUser:
    """A simulated user.

    number: the number from which the user is drawn
    held_out: True if the tastes have properties of HELD_OUT, False if they have properties of PROPERTIES
    rater: the user's way to rate, a key of RATERS
    tastes: one taste; or two tastes, the first for questions with "I", "me" or "my", the second for all other
        questions
    """

    number: int
    held_out: bool
    rater: str
    tastes: tuple[DrawnTaste, ...]

    @classmethod
    def draw(
        cls, number: int, held_out: bool, rater: str | None = None, family: Sequence[str] = ()
    ) -> "DrawnUser":
        """Draw the user with this number.

        held_out: True for properties of HELD_OUT, False for properties of PROPERTIES
        rater: the way to rate; None to draw it at random
        family: the names of the properties (in KNOWN) to draw from, in place of HELD_OUT or PROPERTIES
        """
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
        """Return the rating that the user gives to a reply; None for no rating. stars: the reply's stars by
        the user's taste."""
        if self.rater == "stars":
            return str(stars)
        if self.rater == "noisy":
            return str(6 - stars if rng.random() < FLIPPED else stars)
        up = stars >= 4 and self.rater != "only-down"
        down = stars <= 2 and self.rater != "only-up"
        return "up" if up else "down" if down else None


class DrawnStars:
    """A function (a `Scorer` of users.py) that returns a drawn user's stars for a reply to a question of the
    trial."""

    def __init__(self, user: DrawnUser, frozen: Mapping[str, Sequence[str]]):
        """frozen: the untouched model's replies to each question of the trial."""
        self._user, self._centre = user, dict[str, np.ndarray]()
        # The scale of each taste with K properties: (standard deviations [K], the cuts [4] of `fifths`).
        self._scale: dict[DrawnTaste, tuple[np.ndarray, np.ndarray]] = {}
        for taste in user.tastes:
            values = {
                q: taste.values([q] * len(t), t) for q, t in frozen.items() if user.taste_for(q) is taste
            }
            if values:
                self._measure(taste, values)

    def _measure(self, taste: DrawnTaste, values: Mapping[str, np.ndarray]) -> None:
        """Compute what is usual: the centre of each question and the scale of a taste. The centre is the mean
        of each property in the untouched model's replies to the question. The scale is the standard deviation
        of these replies' differences from the centre of their question. Stars compare a reply with both.

        values: for each question, [R, K], the values of the K properties of R replies
        """
        self._centre |= {question: v.mean(axis=0) for question, v in values.items()}
        differences = np.concatenate([v - self._centre[question] for question, v in values.items()])
        spread = differences.std(axis=0)
        spread[spread < 1e-9] = np.inf  # a property that never varies adds nothing to the score
        self._scale[taste] = spread, fifths(taste.score(differences, np.zeros_like(spread), spread))

    def __call__(self, prompt: str, reply: str, finished: bool) -> int:
        taste = self._user.taste_for(prompt)
        spread, cuts = self._scale[taste]
        score = taste.score(taste.values([prompt], [reply]), self._centre[prompt], spread)
        return int(in_fifths(score, cuts)[0])
