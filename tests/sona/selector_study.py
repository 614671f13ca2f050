"""This command measures the model selector with simulated users: `python -m tests.sona.selector_study`.

No model runs. `selector_vectors.npy` has the vectors of the questions of selector_questions.py, as the
starter model embeds them, and MS has measured times per token.

A simulated user likes the replies of one model to some topics, and those of the other model to the rest. To
long questions, this user likes the same model whatever the topic. The user likes a reply of the right model
with the probability LIKED, and one of the wrong model with the probability DISLIKED, and rates every reply.

The regret is the part of the oracle's reward that the selector loses. The oracle knows the user's taste, and
each fixed arm is one model for all questions.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ruvmlx.models.config.model import Message
from ruvmlx.sona.optional.router import TOPIC
from ruvmlx.sona.optional.selector import WAIT, ModelSelector, SelectorModel, turns_for
from ruvmlx.store import RatedModelChoice, Store

from .selector_questions import questions

VECTORS = Path(__file__).with_name("selector_vectors.npy")
# ms per token, with the prompt, of replies of 64 tokens: the starter and Qwen 2.5 0.5B (Q4_K_M), on the
# native backend of a busy machine with two cores
MS = (23.7, 98.7)
PARAMETERS = (134_515_008, 494_032_768)
LIKED, DISLIKED = 0.85, 0.3
RATINGS, USERS = 300, 24
FIRST_SEED = 1000  # the constants of the selector were chosen with the users of the seeds 0 to 7
TOPICS = sorted({topic for topic, _, _ in questions()})


class StudiedSelector(ModelSelector):
    """The selector with its ratings in a list and not in the store."""

    def __init__(self, store: Store, models: Sequence[SelectorModel]):
        self.rows: list[RatedModelChoice] = []
        super().__init__(store, models)

    def _mark(self) -> object:
        return len(self.rows)

    def _all_rated(self) -> list[RatedModelChoice]:
        return self.rows


def studied_models() -> list[SelectorModel]:
    return [SelectorModel(f"model{n}", f"model {n}", size, 4096) for n, size in enumerate(PARAMETERS)]


def question_turns() -> list[np.ndarray]:
    """Return the cell's input for each question, as the first of a conversation: [1, INPUTS]."""
    found = [turns_for([Message("user", text)], lambda _: None) for _, _, text in questions()]
    for turns, vector in zip(found, np.load(VECTORS), strict=True):
        turns[0, :TOPIC] = vector
    return found


class SimulatedUser:
    """A user whose best model depends on the topic and on the length of the question."""

    def __init__(self, rng: np.random.Generator):
        order = rng.permutation(len(TOPICS))
        self._large = {TOPICS[n] for n in order[: len(TOPICS) // 2]}
        self._long = int(rng.integers(2))  # the model for long questions

    def best(self, topic: str, is_long: bool) -> int:
        return self._long if is_long else int(topic in self._large)


def speed(ms: float) -> float:
    """Return the factor of a reward for the time per token."""
    return 1 - WAIT * float(np.log2(ms / np.sqrt(MS[0] * MS[1])))


def simulate(seed: int, turns: Sequence[np.ndarray], store: Store, ratings: int = RATINGS) -> np.ndarray:
    """Return the expected rewards [ratings, 4] of the oracle, the selector, the small and the large model."""
    rng = np.random.default_rng(seed)
    user, asked = SimulatedUser(rng), questions()
    selector, found = StudiedSelector(store, studied_models()), np.zeros((ratings, 4))
    for i in range(ratings):
        at = int(rng.integers(len(asked)))
        topic, is_long, _ = asked[at]
        best = user.best(topic, is_long)
        rewards = [(LIKED if arm == best else DISLIKED) * speed(MS[arm]) for arm in (0, 1)]
        chosen = selector.choose(turns[at], int(rng.integers(1 << 30)))
        arm = selector.arms.index(chosen.model.fingerprint)
        found[i] = max(rewards), rewards[arm], *rewards
        rating = "up" if rng.random() < (LIKED if arm == best else DISLIKED) else "down"
        ms = MS[arm] * float(rng.lognormal(0, 0.2))
        selector.rows.append(RatedModelChoice(f"r{i}", selector.arms[arm], turns[at], rating, ms))
    return found


def regrets(rewards: np.ndarray) -> tuple[float, float]:
    """Return (the selector's regret, the regret of the better fixed model): parts of the oracle's reward."""
    oracle, mine, *fixed = rewards.sum(axis=0)
    return float(1 - mine / oracle), float(1 - max(fixed) / oracle)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, low, high): the mean with its 95% interval over the users."""
    half = 1.96 * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(np.mean(values) - half), float(np.mean(values) + half)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=USERS)
    users = parser.parse_args(arguments).users
    turns = question_turns()
    with TemporaryDirectory() as folder:
        store = Store(Path(folder) / "ruvmlx.db")
        found = [simulate(seed, turns, store) for seed in range(FIRST_SEED, FIRST_SEED + users)]
        store.close()
    print(f"{users} users, {RATINGS} ratings each: mean and 95% interval over the users")
    for name, begin in (("all ratings", 0), ("ratings 201 to 300", 200)):
        pairs = [regrets(rewards[begin:]) for rewards in found]
        for who, values in zip(("selector", "better fixed model"), zip(*pairs, strict=True), strict=True):
            mean, low, high = interval(values)
            print(f"{name:<20} {who:<20} {100 * mean:5.1f}%  ({100 * low:.1f} to {100 * high:.1f})")


if __name__ == "__main__":
    main(sys.argv[1:])
