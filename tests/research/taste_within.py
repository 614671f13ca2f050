"""How well the taste model knows drawn users, with and without unshown replies to the rated questions.

    python -m tests.research.taste_within BANK        # a bank of tests.research.style_study

Nothing is generated. Each user reads one reply of the bank to each of half of its questions, 30 in all, and
rates it or passes it over. The model then predicts the stars of all replies to the other half. Printed for
each family of tastes: the correlation with the true stars among the replies to one question, and how often
the reply that the model would pick is better than another one (a tie counts half). The family `stranger` was
written by someone who knew neither the measures nor the other families.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from ruvmlx.apps.prove import drawn_tastes
from ruvmlx.apps.prove.drawn_users import DrawnStars, DrawnUser
from ruvmlx.apps.prove.raters import RATERS
from ruvmlx.apps.prove.statistics import mean_interval

from ruvmlx.models.config.model import Model
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sona.optional.style_bank import StyleBank, texts
from ruvmlx.sona.taste import RatedFeatures, TasteModel, background_counts
from ruvmlx.sona.taste_features import ReplyFeatures, features_of
from ruvmlx.sona.unshown import REPLIES

from .stranger_properties import PROPERTIES as STRANGER

FAMILIES = {"tuning": drawn_tastes.PROPERTIES, "held-out": drawn_tastes.HELD_OUT, "stranger": STRANGER}
SEEDS = 2


class TasteWithin:
    """The bank's replies, and users who rate them."""

    def __init__(self, model: Model, bank: StyleBank):
        asked, decode = texts("style_questions"), model.tokenizer.decode
        self.replies = [(asked[q], decode(ids), ended) for q, ids, ended in bank.replies]
        self.question = np.array([q for q, *_ in bank.replies])
        self.features = [features_of(*reply) for reply in self.replies]

    def results(
        self, family: str, users: int, read: int, compares: bool, rater: str | None = None
    ) -> Iterator[tuple[float, float]]:
        """Yield (correlation, win-rate of the pick) of each user and seed. read: replies that the user reads
        and may rate. compares: are there unshown replies?"""
        for number in range(users):
            user = drawn_user(family, number, rater)
            stars = self.stars(user)
            for seed in range(SEEDS):
                rng = np.random.default_rng([number, seed, 5])
                questions = rng.permutation(self.question.max() + 1)
                rated = np.isin(self.question, questions[: len(questions) // 2])
                asked = rng.permutation(np.unique(self.question[rated]))[:read]
                seen = [self.sample_reply(user, stars, question, rng)[1] for question in asked]
                if not compares:
                    seen = [RatedFeatures(one.features, one.rating) for one in seen]
                given = [one for one in seen if one.rating]
                if given:
                    passed_over = [one for one in seen if not one.rating]
                    model = TasteModel.fit(given, passed_over if background_counts(given) else ())
                    yield self._result(model, stars, np.flatnonzero(~rated))

    def stars(self, user: DrawnUser) -> np.ndarray:
        known: dict[str, list[str]] = {}
        for question, text, _ in self.replies:
            known.setdefault(question, []).append(text)
        stars = DrawnStars(user, known)
        return np.array([stars(*reply) for reply in self.replies], float)

    def sample_reply(
        self, user: DrawnUser, stars: np.ndarray, question: int, rng: np.random.Generator
    ) -> tuple[int, RatedFeatures]:
        """Return (row, reply) of one reply to a question, which the user rates or passes over."""
        shown, *others = rng.permutation(np.flatnonzero(self.question == question))
        usual = np.mean([self.features[i].measures for i in others[:REPLIES]], axis=0)
        rating = user.rating(int(stars[shown]), rng) or ""
        return int(shown), RatedFeatures(self.features[shown], rating, usual)

    def _result(self, model: TasteModel, stars: np.ndarray, unseen: np.ndarray) -> tuple[float, float]:
        features: list[ReplyFeatures] = [self.features[i] for i in unseen]
        predicted, product, squares, wins = model.predict(features)[0], 0.0, np.zeros(2), []
        for question in np.unique(self.question[unseen]):
            one = self.question[unseen] == question
            p, s = predicted[one], stars[unseen][one]
            a, b = p - p.mean(), s - s.mean()
            product, squares = product + a @ b, squares + np.array([a @ a, b @ b])
            best = s[p.argmax()]
            wins.append(np.mean((best > s) + 0.5 * (best == s)))
        return float(product / np.sqrt(max(squares.prod(), 1e-12))), float(np.mean(wins))


def drawn_user(family: str, number: int, rater: str | None = None) -> DrawnUser:
    """rater: how this user rates; None: drawn, too."""
    if rater is not None:
        return replace(drawn_user(family, number), rater=rater)
    if family != "stranger":
        return DrawnUser.draw(number, held_out=family == "held-out")
    drawn_tastes.KNOWN.update(STRANGER)
    return DrawnUser.draw(number, held_out=True, family=list(STRANGER))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("bank", type=Path)
    ask.add_argument("--users", type=int, default=30)
    ask.add_argument("--ratings", type=int, default=30)
    ask.add_argument("--rater", choices=RATERS, help="how all users rate; by default drawn for each")
    given = ask.parse_args()
    study = TasteWithin(load_model(str(starter_path())), StyleBank.from_bytes(given.bank.read_bytes()))
    for family in FAMILIES:
        for compares in (False, True):
            found = np.array(list(study.results(family, given.users, given.ratings, compares, given.rater)))
            low, high = mean_interval(found[:, 1])
            print(
                f"{family:9} {'with' if compares else 'without'} unshown replies: "
                f"correlation {found[:, 0].mean():.2f}, "
                f"pick {found[:, 1].mean():.1%} ({low:.1%} to {high:.1%})"
            )


if __name__ == "__main__":
    main()
