"""The router chooses how each reply is generated. The router learns from the ratings and latencies of earlier
replies.

An arm is a way to generate a reply. There are up to four arms. An arm uses the learned adapter or the
original model, with or without liked replies as examples in the prompt (if the user allows examples). A
recurrent cell, FastGRNN (fastgrnn.py), reads the newest turns of the conversation. One Bayesian regression
per arm predicts the reward and its uncertainty (bandit.py). A reward is drawn for each arm, and the arm with
the largest reward is chosen.
    reward = quality of the reply * max(0, 2 - latency_ratio)        (signal.py)

The router's state depends only on the choices whose ratings are in force (not taken back) and on the trained
cell. So the same ratings and cell give bit for bit the same state, also after an undo, a restart or another
process's rating. The router uses only the newest WINDOW ratings, because the adapter, which is part of an
arm, keeps changing. The precision of the KV cache is not an arm, because measurements choose this precision
(kv_tuning/tier_choice.py).
"""

import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...models.config.model import Message
from ...store import RatedRoute, RouteRow, Store
from .. import signal
from ..adapter_history import AdapterHistory
from . import bandit, fastgrnn
from .bandit import Regression
from .router_lora import Evidence, RouterLoRA, errors, fit, train

ARMS = ("adapter", "plain", "adapter+examples", "plain+examples")
WINDOW = 512  # the maximum number of rated replies that the router uses: only the newest replies
TURNS = 8  # the maximum number of turns of a conversation that the cell reads: only the newest
TOPIC = 32  # the size of a question's vector after its projection
INPUTS = TOPIC + 2  # the size of the cell's input for one turn
MINIMUM = 64  # the minimum number of rated choices for a training; about a quarter is held out
_LENGTH = 4.0  # the norm of a question's vector: the gates' inputs then have a standard deviation near 0.7
REPORT_CONVERSATIONS = 64  # the number of newest conversations over which the status averages


@dataclass(frozen=True, eq=False)
class Route:
    """The choice of an arm for one reply.

    probability: the probability with which the router chose this arm
    best: {arm: the probability that this arm is the best arm}
    """

    arm: str
    probability: float
    turns: np.ndarray  # the cell's input for the conversation, [T, INPUTS] float32
    best: dict[str, float]

    @property
    def adapter(self) -> bool:
        """True if the arm uses the learned adapter."""
        return self.arm.startswith("adapter")

    @property
    def examples(self) -> bool:
        return self.arm.endswith("+examples")

    def without_examples(self) -> "Route":
        """Return this choice for a user without liked replies that can be examples: an arm with examples
        becomes the same arm without examples."""
        best: dict[str, float] = {}
        for arm, share in self.best.items():
            plain = arm.removesuffix("+examples")
            best[plain] = best.get(plain, 0.0) + share
        arm = self.arm.removesuffix("+examples")
        return Route(arm, best[arm], self.turns, best)

    def row(self, reply_id: str, fingerprint: str, name: str) -> RouteRow:
        return RouteRow(reply_id, fingerprint, name, self.arm, self.probability, self.turns, self.best)


@dataclass(frozen=True)
class ArmStatus:
    """The status of one arm.

    chosen: the number of stored choices of this arm
    rated: the number of replies with this arm among the newest WINDOW rated replies
    mean_reward: the mean reward of the `rated` replies; None if there are none
    best: the probability that this is the best arm, averaged over the newest conversations
    """

    arm: str
    chosen: int
    rated: int
    mean_reward: float | None
    best: float


@dataclass(frozen=True)
class RouterStatus:
    """The router's status. default: the arm that the runtime uses if the router is off. training: the report
    of the cell's newest training; {} if there was no training."""

    arms: list[ArmStatus]
    default: str
    training: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        return {"default": self.default, "arms": [vars(arm) for arm in self.arms], "training": self.training}


def offered_arms(examples: bool) -> tuple[str, ...]:
    """Return the arms to choose from. The first arm is the arm that the runtime uses if the router is off.
    examples: True if the user allows examples in the prompt."""
    return ("adapter+examples", "plain+examples", "adapter", "plain") if examples else ("adapter", "plain")


def turns_of(messages: Sequence[Message], vector_of: Callable[[str], np.ndarray | None]) -> np.ndarray:
    """Return the cell's input for the newest TURNS turns of a conversation: [T, INPUTS] float32.

    vector_of: a function that returns a question's whitened vector (embedding.py); if it returns None, zeros
        take the place of the vector
    """
    said = [m for m in messages if m.role in ("user", "assistant")][-TURNS:]
    rows = np.zeros((len(said), INPUTS), np.float32)
    for row, m in zip(rows, said, strict=True):
        vector = vector_of(m.content) if m.role == "user" else None
        if vector is not None:
            row[:TOPIC] = _LENGTH * (vector @ _projection(len(vector)))
        row[TOPIC] = 1.0 if m.role == "user" else -1.0
        row[TOPIC + 1] = np.log1p(len(m.content)) / 4 - 1  # about -0.4 for one word, and 1 for 3,000 letters
    return rows


@cache
def _projection(width: int) -> np.ndarray:
    """Return a projection matrix [width, TOPIC] of random signs, which is the same on every machine. The
    projection keeps the squared norm of a vector on average."""
    signs = np.random.Generator(np.random.PCG64(2)).integers(0, 2, (width, TOPIC), dtype=np.int8)
    return (2 * signs.astype(np.float32) - 1) / np.float32(np.sqrt(TOPIC))


class ArmChooser(ABC):
    """A bandit over a few arms. The store has its choices, their ratings and its trained cell. A subclass
    says which arms there are, and reads the ratings."""

    explore = 1.0  # how freely the chooser tries arms that seem worse (bandit.choose)

    def __init__(
        self, store: Store, cell: tuple[str, str], arms: tuple[str, ...], inputs: int, direct: bool = False
    ):
        """cell: the key of the trained cell in the store. inputs: the number of inputs for one turn. direct:
        True if the arms' features also have the newest turn as it is."""
        self._store, self._cell, self.arms, self._inputs = store, cell, arms, inputs
        self._known: Any = None  # the versions of the store's data from which the arms were fitted
        self._fresh = RouterLoRA.fresh(inputs, len(arms), direct=direct)
        self._lora, self._arms = self._fresh, self._priors()

    @abstractmethod
    def _priors(self) -> list[Regression]:
        """Return each arm's regression before any rating."""

    @abstractmethod
    def _mark(self) -> object:
        """Return a value that changes when the ratings in force change."""

    @abstractmethod
    def _rated_choices(self) -> list[RatedRoute]:
        """Return the choices for the newest WINDOW rated replies, the oldest rating first."""

    @abstractmethod
    def _labels(self, rows: list[RatedRoute]) -> list[str]:
        """Return the ratings with which the star ratings of `rows` are compared, including those of
        `rows`."""

    def sync(self) -> None:
        """Fit the arms' regressions to the ratings in force, if the ratings or the cell in the store have
        changed. The fit takes milliseconds."""
        state, _ = self._store.routes.cell(*self._cell)
        known = (self._mark(), state)
        if known == self._known:
            return
        fresh, count = self._fresh, len(self.arms)
        lora = RouterLoRA.from_bytes(state, self._inputs, count, fresh.direct) if state is not None else None
        self._lora = lora or fresh
        self._arms = fit(self._lora, self._evidence(self._sound_choices()), self._priors())
        self._known = known

    def _sound_choices(self) -> list[RatedRoute]:
        """Return the rated choices without those that an older version of ruvmlx stored in another format."""
        return [
            row
            for row in self._rated_choices()
            if row.arm in self.arms and row.turns.shape[1] == self._inputs and np.isfinite(row.turns).all()
        ]

    def _evidence(self, rows: list[RatedRoute]) -> Evidence:
        """Return the choices with their rewards. The reward of a rating depends on all ratings in force."""
        labels = [signal.INDEX[rating] for rating in self._labels(rows)]
        counts = np.bincount(np.array(labels, np.intp), minlength=len(signal.LABELS))
        rewards = [_reward(row.reply_id, row.rating, counts, row.latency_ratio) for row in rows]
        x, mask = fastgrnn.pad_conversations([row.turns for row in rows], self._inputs)
        arms = np.array([self.arms.index(row.arm) for row in rows], np.intp)
        return Evidence(x, mask, arms, np.array(rewards))

    # -- choosing ----------------------------------------------------------------------------------------

    def draw(
        self, turns: np.ndarray, arms: tuple[str, ...], seed: int | None = None
    ) -> tuple[str, dict[str, float]]:
        """Draw one of these arms for a conversation [T, inputs]. Return the arm and, for each arm, the
        probability that it is the best arm. The same seed (not None), conversation, ratings and cell give the
        same arm."""
        self.sync()
        entropy = None if seed is None else [seed, zlib.crc32(turns.tobytes())]
        index, best = bandit.choose(self.beliefs(turns, arms), np.random.default_rng(entropy), self.explore)
        return arms[index], dict(zip(arms, best.tolist(), strict=True))

    def beliefs(self, turns: np.ndarray, arms: tuple[str, ...]) -> list[tuple[float, float]]:
        """Return (mean, standard deviation) of each arm's expected reward for a conversation."""
        numbers = [self.arms.index(arm) for arm in arms]
        features = self._lora.features(turns, numbers)
        return [self._arms[k].expects(phi) for k, phi in zip(numbers, features, strict=True)]

    # -- training ----------------------------------------------------------------------------------------

    def train(self, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Train a new cell. Replace the cell in use if the new cell predicts held-out ratings better. Return
        a report.

        A hash of the replies' ids holds out about a quarter of the rated replies for this comparison. The
        squared error of the new cell must be smaller than the error of the cell in use by more than twice the
        standard error of the difference.
        """
        self.sync()
        rows, priors = self._sound_choices(), self._priors()
        evidence = self._evidence(rows)
        if len(evidence) < MINIMUM:
            why = f"{len(evidence)} rated choices; training needs {MINIMUM}"
            return {"trained": False, "ratings": len(evidence), "reason": why}
        judging = np.array([zlib.crc32(row.reply_id.encode()) % 4 == 3 for row in rows])
        known, unseen = evidence.where(~judging), evidence.where(judging)
        if min(len(known), len(unseen)) < 2:  # one reply has no standard error
            why = (
                f"{len(unseen)} of {len(evidence)} rated choices are held out; training and test need 2 each"
            )
            return {"trained": False, "ratings": len(evidence), "reason": why}
        new = train(self._fresh, known, priors, cancel=cancel)
        if new is None:
            return {"trained": False, "ratings": len(evidence), "reason": "stopped"}
        before, after = (errors(lora, known, unseen, priors) for lora in (self._lora, new))
        gain = before - after
        doubt = 2 * float(gain.std(ddof=1)) / np.sqrt(len(gain))
        better = bool(np.isfinite(gain).all() and gain.mean() > doubt)
        report = {
            "trained": better,
            "ratings": len(evidence),
            "error_before": float(before.mean()),
            "error_after": float(after.mean()),
            "reason": "predicts held-out ratings better" if better else "no better on held-out ratings",
        }
        state, _ = self._store.routes.cell(*self._cell)
        self._store.routes.put_cell(*self._cell, new.to_bytes() if better else state, report)
        return report

    # -- status ------------------------------------------------------------------------------------------

    def statuses(
        self, offered: tuple[str, ...], chosen: dict[str, int], recent: list[np.ndarray]
    ) -> list[ArmStatus]:
        """Return the status of each arm that is offered or was chosen. chosen: the number of stored choices
        of each arm. recent: the turns of the newest conversations."""
        self.sync()
        rng, empty = np.random.default_rng(0), np.zeros((0, self._inputs))
        shares = [bandit.choose(self.beliefs(t, offered), rng)[1] for t in recent or [empty]]
        best = dict(zip(offered, np.mean(shares, axis=0).tolist(), strict=True))
        return [
            ArmStatus(arm, chosen.get(arm, 0), known.count, known.mean_reward, best.get(arm, 0.0))
            for arm, known in zip(self.arms, self._arms, strict=True)
            if arm in best or chosen.get(arm)
        ]


class Router(ArmChooser):
    """The router of one adapter on one model. The router needs only the store and not the model's weights."""

    def __init__(self, store: Store, history: AdapterHistory, fingerprint: str, examples: bool = False):
        """examples: True if the user allows examples in the prompt."""
        self._history, self._mine = history, (fingerprint, history.name)
        self.offered = offered_arms(examples)
        super().__init__(store, self._mine, ARMS, INPUTS)

    def _priors(self) -> list[Regression]:
        means = [bandit.DEFAULT_MEAN if arm == self.offered[0] else bandit.OTHER_MEAN for arm in ARMS]
        return [Regression.prior(1 + fastgrnn.HIDDEN, mean) for mean in means]

    def _mark(self) -> object:
        return self._history.version(), self._store.routes.rated_mark(*self._mine)

    def _rated_choices(self) -> list[RatedRoute]:
        teaching = {reply_id for reply_id, *_ in self._history.labels()}
        rows = self._store.routes.rated_routes(*self._mine, WINDOW)
        return [row for row in rows if row.reply_id in teaching]

    def _labels(self, rows: list[RatedRoute]) -> list[str]:
        return [rating for _, rating, _ in self._history.labels()]

    def choose(
        self, turns: np.ndarray, seed: int | None = None, arms: tuple[str, ...] | None = None
    ) -> Route:
        """Choose an arm for a conversation. The same seed (not None), conversation, ratings and cell give the
        same choice.

        turns: [T, INPUTS], the conversation's turns from `turns_of`
        arms: the arms from which to choose; None for all offered arms
        """
        arm, shares = self.draw(turns, arms or self.offered, seed)
        return Route(arm, shares[arm], turns, shares)

    def status(self) -> RouterStatus:
        chosen = self._store.routes.counts(*self._mine)
        recent = [turns for _, turns in self._store.routes.newest(*self._mine, REPORT_CONVERSATIONS)]
        arms = self.statuses(self.offered, chosen, recent)
        return RouterStatus(arms, self.offered[0], self._store.routes.cell(*self._mine)[1])


def _reward(reply_id: str, rating: str, counts: np.ndarray, latency_ratio: float) -> float:
    """Return the reward of a rating: its quality (for stars, from its rank among the other ratings), scaled
    by the speed of the reply. counts: the number of ratings with each label of `signal.LABELS`, including
    this rating."""
    others = counts.copy()
    others[signal.INDEX[rating]] -= 1
    return signal.extract(reply_id, rating, others, latency_ratio=latency_ratio).reward
