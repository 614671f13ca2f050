"""Compares models of a user's taste: python -m tests.research.taste_study FILE.npz

Each model sees the stars of 10, 30 or 100 replies of the frozen model and predicts those of 8 replies to each
unseen question. Printed: the correlation with the true stars among the 8 replies to one question; how often
the reply that it would pick is better than a random one of the 8 (a tie counts half); the share of true stars
within its 80% interval. The replies are sampled into FILE if it is not there (ten minutes on two cores).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from ruvmlx.apps.prove import drawn_tastes, prompts
from ruvmlx.apps.prove.statistics import judged_wins
from ruvmlx.apps.prove.trial import Bench, TrialSetup
from ruvmlx.apps.prove.users import TASTES

from ruvmlx.settings import Settings
from ruvmlx.sona.taste import RatedFeatures, TasteModel
from ruvmlx.sona.taste_features import ReplyFeatures, features_of

from .taste_replies import REPLIES, SampledReplies, sample
from .taste_rivals import RIVALS, Kernels

RATINGS = (10, 30, 100)
WITHIN = 1.2816  # standard deviations: 80% of a normal distribution
DRAWN = 10  # users of the held-out family
NAMED = [name for name in TASTES if name != "spanish"]  # Spanish is out of the starter model's reach
Press = Callable[[np.ndarray], np.ndarray]  # stars -> which of these replies get a thumb


@dataclass(frozen=True)
class Result:
    agreement: float
    win_rate: float
    best: float  # win-rate of a perfect judge
    within: float  # share of true stars in the 80% interval


class Study:
    """seed: which replies are rated, in which order."""

    def __init__(self, replies: SampledReplies):
        self.replies, self.kernels = replies, Kernels(replies)
        self._unseen = np.flatnonzero(~replies.trained[replies.question])

    @cached_property
    def features(self) -> list[ReplyFeatures]:
        r = self.replies
        return [
            features_of(r.questions[q], text, bool(end))
            for q, text, end in zip(r.question, r.texts, r.finished, strict=True)
        ]

    def stars(self, user: str) -> np.ndarray:
        """[R] of a named user, or of a drawn one: a number."""
        r = self.replies
        asked = [r.questions[q] for q in r.question]
        if user.isdigit():
            return drawn_tastes.stars(int(user), asked, r.texts)[1]
        return np.array(
            [TASTES[user](*reply) for reply in zip(asked, r.texts, r.finished, strict=True)], float
        )

    def order(self, seed: int) -> np.ndarray:
        """Rows of all rated replies: every question once, then every question again with another reply."""
        rng = np.random.default_rng([seed, 77])
        rounds = [rng.permutation(REPLIES) for _ in range(int(self.replies.trained.sum()))]
        return np.array(
            [REPLIES * q + which[turn] for turn in range(REPLIES) for q, which in enumerate(rounds)]
        )

    def taste(self, rated: np.ndarray, given: list[str], background: np.ndarray) -> TasteModel:
        ratings = [RatedFeatures(self.features[i], rating) for i, rating in zip(rated, given, strict=True)]
        return TasteModel.fit(ratings, [RatedFeatures(self.features[i], "") for i in background])

    def predict_all(self, model: TasteModel) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation [R]; only those of unseen questions are used."""
        mean, sd = np.zeros((2, len(self.features)))
        mean[self._unseen], sd[self._unseen] = model.predict([self.features[i] for i in self._unseen])
        return mean, sd

    def result(self, mean: np.ndarray, sd: np.ndarray, stars: np.ndarray) -> Result:
        """Over the unseen questions."""
        m, s, t = (values[self._unseen].reshape(-1, REPLIES) for values in (mean, sd, stars))
        a, b = ((x - x.mean(axis=1, keepdims=True)).ravel() for x in (m, t))
        agreement = float(a @ b / np.sqrt(max(a @ a * (b @ b), 1e-12)))
        return Result(
            agreement, judged_wins(m, t), judged_wins(t, t), float(np.mean(abs(m - t) < WITHIN * s))
        )


def _mean(results: list[Result]) -> Result:
    return Result(*(float(np.mean([getattr(r, name) for r in results])) for name in Result.__annotations__))


def comparison_rows(study: Study, users: list[str], seeds: int, models: list[str]) -> Iterator[str]:
    """Rows of a table: each model by the number of ratings."""
    yield _head(users)
    for name in models:
        for count in RATINGS:
            started, found = time.perf_counter(), {}
            for user in users:
                stars, results = study.stars(user), []
                for seed in range(seeds):
                    rated = study.order(seed)[:count]
                    results.append(study.result(*_by(study, name, rated, stars[rated]), stars))
                found[user] = _mean(results)
            ms = 1e3 * (time.perf_counter() - started) / seeds / len(users)
            yield _row(f"{name}, {count}", found, f"{ms:.0f} ms")


def _by(study: Study, name: str, rated: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if name in RIVALS:
        return RIVALS[name](study.kernels, rated, given)
    return study.predict_all(study.taste(rated, [str(int(s)) for s in given], rated[:0]))


def _head(users: list[str]) -> str:
    return f"{'':34s}" + "".join(f"{user:>12s}" for user in users) + "        mean  (best)  in 80%"


def _row(name: str, found: dict[str, Result], beside: str = "") -> str:
    cells = "".join(f"{r.agreement:6.2f} {r.win_rate:4.0%} " for r in found.values())
    mean = _mean(list(found.values()))
    all_ = f"{mean.agreement:.3f} {mean.win_rate:5.1%} ({mean.best:.1%}) {mean.within:4.0%}"
    return f"{name:34s}{cells}  {all_}  {beside}"


# -- the taste model alone: noise, one thumb, a turn -----------------------------------------------------


def _up(stars: np.ndarray) -> np.ndarray:
    return stars >= 4


def _down(stars: np.ndarray) -> np.ndarray:
    return stars <= 2


PRESSES: dict[str, Press] = {"only up": _up, "only down": _down, "thumbs": lambda s: _up(s) | _down(s)}


def noisy(study: Study, users: list[str], seeds: int, flip: float) -> Iterator[str]:
    """Stars turned around with a probability."""
    for count in RATINGS:
        found = {}
        for user in users:
            stars, results = study.stars(user), []
            for seed in range(seeds):
                rated = study.order(seed)[:count]
                wrong = np.random.default_rng([seed, 5]).random(count) < flip
                given = np.where(wrong, 6 - stars[rated], stars[rated])
                results.append(study.result(*_by(study, "taste model", rated, given), stars))
            found[user] = _mean(results)
        yield _row(f"{flip:.0%} wrong, {count}", found)


def thumb_rows(study: Study, users: list[str], seeds: int, kind: str) -> Iterator[str]:
    """Thumbs by people who press only at some replies; the others that they saw are the background."""
    for count in RATINGS:
        found = {}
        for user in users:
            stars, results = study.stars(user), []
            for seed in range(seeds):
                seen = study.order(seed)
                hit = PRESSES[kind](stars[seen])
                end = int(np.searchsorted(np.cumsum(hit), count)) + 1  # the press number `count`
                seen, hit = seen[:end], hit[:end]
                given = ["up" if s >= 4 else "down" for s in stars[seen[hit]]]
                model = study.taste(seen[hit], given, seen[~hit])
                results.append(study.result(*study.predict_all(model), stars))
            found[user] = _mean(results)
        yield _row(f"{kind}, {count} presses", found)


def turn_rows(study: Study, users: list[str], seeds: int, old: int = 100) -> Iterator[str]:
    """The user wants the opposite after `old` ratings."""
    for new in (0, 5, 10, 20, 40):
        found = {}
        for user in users:
            stars, results = study.stars(user), []
            for seed in range(seeds):
                rated = study.order(seed)[: old + new]
                given = np.where(np.arange(old + new) < old, stars[rated], 6 - stars[rated])
                now = 6 - stars if new else stars
                results.append(study.result(*_by(study, "taste model", rated, given), now))
            found[user] = _mean(results)
        yield _row(f"turned, {old} + {new}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", type=int, metavar="N", help="users N to N + 9 drawn at random")
    given = parser.parse_args()
    if not given.file.exists():
        _sample_replies().save(given.file)
    study = Study(SampledReplies.load(given.file))
    if given.held_out is not None:
        drawn = [str(given.held_out + n) for n in range(DRAWN)]
        _print(comparison_rows(study, drawn, given.seeds, [*RIVALS, "taste model"]))
        return
    _print(comparison_rows(study, NAMED, given.seeds, [*RIVALS, "taste model"]))
    for flip in (0.1, 0.2):
        _print(noisy(study, NAMED, given.seeds, flip))
    for kind in PRESSES:
        _print(thumb_rows(study, NAMED, given.seeds, kind))
    _print(turn_rows(study, NAMED, given.seeds))


def _print(rows: Iterator[str]) -> None:
    for row in rows:
        print(row, flush=True)


def _sample_replies() -> SampledReplies:
    from ruvmlx.backends.select import open_backend
    from ruvmlx.models.load import load_model

    settings = Settings()
    model = load_model(settings.model)
    bench = Bench(model, open_backend(settings.backend, model, settings.threads, 0))
    setting = TrialSetup(TASTES["brevity"], prompts.own("train"), prompts.own("heldout"), 0, ())
    return sample(bench, setting)


if __name__ == "__main__":
    main()
