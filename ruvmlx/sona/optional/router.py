"""The router chooses how each reply is generated. It learns from the ratings and latencies of earlier
replies.

There are up to four ways to generate a reply, which are called arms. An arm uses the learned adapter or the
original model, with or without liked replies as examples in the prompt (if the user allows examples). A
FastGRNN (fastgrnn.py) reads the newest turns of the conversation. One Bayesian regression per arm predicts
the reward and its uncertainty (bandit.py). A reward is drawn for each arm, and the arm with the largest
reward is chosen.

    reward = quality * max(0, 2 - latency_ratio)        (signal.py)

The state depends only on the ratings in force and on the trained cell. So the state is bit for bit the same
after an undo, a restart or another process's rating. Only the newest WINDOW ratings are used, because the
adapter, which is part of an arm, keeps changing. The precision of the KV cache is not an arm, because
measurements choose it (kv_tuning/tier_choice.py).
"""

import threading
import zlib
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
WINDOW = 512  # the number of newest rated choices that are used
TURNS = 8  # the maximum number of newest turns that the cell reads
TOPIC = 32  # the number of dimensions of a question's vector after projection
INPUTS = TOPIC + 2
MINIMUM = 64  # the number of rated choices that a training needs; a quarter of them is held out
_LENGTH = 4.0  # the norm of a question's vector: the gates' inputs then have a standard deviation near 0.7
_REPORT_CONVERSATIONS = 64  # a report averages over this many newest conversations


@dataclass(frozen=True, eq=False)
class Route:
    """The choice of an arm for one reply. probability: the probability with which this arm is chosen. best:
    {arm: the probability that it is the best arm}."""

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
        """Return the choice for a conversation for which there are no liked replies. Arms with and without
        examples are then the same."""
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

    chosen, rated: the number of replies with this arm, and of these replies with a rating
    mean_reward: the mean reward of the rated replies; None if there are no ratings
    best: the probability of being the best arm, averaged over the newest conversations
    """

    arm: str
    chosen: int
    rated: int
    mean_reward: float | None
    best: float


@dataclass(frozen=True)
class RouterStatus:
    """The router's status. default: the arm that is used without a router. training: the report of the newest
    training; {} if there was no training."""

    arms: list[ArmStatus]
    default: str
    training: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        return {"default": self.default, "arms": [vars(arm) for arm in self.arms], "training": self.training}


def offered_arms(examples: bool) -> tuple[str, ...]:
    """Return the arms to choose from. The first arm is the arm that is used without a router."""
    return ("adapter+examples", "plain+examples", "adapter", "plain") if examples else ("adapter", "plain")


def turns_of(messages: Sequence[Message], vector_of: Callable[[str], np.ndarray | None]) -> np.ndarray:
    """Return the cell's input for a conversation: [T, INPUTS] float32, the newest TURNS turns.

    vector_of: a function that returns a question's whitened vector; if it returns None, the topic is a vector
        of zeros
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
    """Return a random projection [width, TOPIC] of signs, the same on every machine. The projection keeps the
    mean squared norm of vectors."""
    signs = np.random.Generator(np.random.PCG64(2)).integers(0, 2, (width, TOPIC), dtype=np.int8)
    return (2 * signs.astype(np.float32) - 1) / np.float32(np.sqrt(TOPIC))


class Router:
    """The router of one adapter on one model. The router needs only the store and no weights."""

    def __init__(self, store: Store, history: AdapterHistory, fingerprint: str, examples: bool = False):
        """examples: True if the user allows examples."""
        self._store, self._history, self._mine = store, history, (fingerprint, history.name)
        self.offered = offered_arms(examples)
        self._known: Any = None  # the versions of the store's data from which the arms were fitted
        self._lora = RouterLoRA.fresh(INPUTS, len(ARMS))
        self._arms = self._priors()

    def _priors(self) -> list[Regression]:
        means = [bandit.DEFAULT_MEAN if arm == self.offered[0] else bandit.OTHER_MEAN for arm in ARMS]
        return [Regression.prior(1 + fastgrnn.HIDDEN, mean) for mean in means]

    def sync(self) -> None:
        """Fit the arms to the ratings in force, unless nothing in the store has changed. This takes
        milliseconds."""
        state, _ = self._store.routes.cell(*self._mine)
        known = (self._history.version(), self._store.routes.rated_mark(*self._mine), state)
        if known == self._known:
            return
        lora = RouterLoRA.from_bytes(state, INPUTS, len(ARMS)) if state is not None else None
        self._lora = lora or RouterLoRA.fresh(INPUTS, len(ARMS))
        self._arms = fit(self._lora, self._evidence(self._rated_choices()), self._priors())
        self._known = known

    def _rated_choices(self) -> list[RatedRoute]:
        """Return the newest rated choices that are stored in the current format."""
        return [
            row
            for row in self._store.routes.rated_routes(*self._mine, WINDOW)
            if row.arm in ARMS and row.turns.shape[1] == INPUTS and np.isfinite(row.turns).all()
        ]

    def _evidence(self, rows: list[RatedRoute]) -> Evidence:
        """Return the choices with their rewards, computed from all ratings in force."""
        labels = [signal.INDEX[rating] for _, rating, _ in self._store.ratings.labels(*self._mine)]
        counts = np.bincount(labels, minlength=len(signal.LABELS))
        rewards = [_reward(row.reply_id, row.rating, counts, row.latency_ratio) for row in rows]
        x, mask = fastgrnn.pad_conversations([row.turns for row in rows], INPUTS)
        arms = np.array([ARMS.index(row.arm) for row in rows], np.intp)
        return Evidence(x, mask, arms, np.array(rewards))

    # -- choosing ----------------------------------------------------------------------------------------

    def choose(
        self, turns: np.ndarray, seed: int | None = None, arms: tuple[str, ...] | None = None
    ) -> Route:
        """Choose an arm for a conversation [T, INPUTS]. arms: the arms from which to choose; None for all
        offered arms.

        The choice is deterministic for a seed, a conversation and the ratings.
        """
        self.sync()
        arms = arms or self.offered
        entropy = None if seed is None else [seed, zlib.crc32(turns.tobytes())]
        index, best = bandit.choose(self._beliefs(turns, arms), np.random.default_rng(entropy))
        shares = dict(zip(arms, best.tolist(), strict=True))
        return Route(arms[index], shares[arms[index]], turns, shares)

    def _beliefs(self, turns: np.ndarray, arms: tuple[str, ...]) -> list[tuple[float, float]]:
        h = self._lora.states([turns], INPUTS)
        numbers = [ARMS.index(arm) for arm in arms]
        return [self._arms[k].expects(self._lora.phi(h, k)[0]) for k in numbers]

    # -- training ----------------------------------------------------------------------------------------

    def train(self, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Train a new cell, and use this cell if it predicts held-out ratings better.

        A quarter of the replies is held out, always the same replies. The squared error of the new cell must
        be smaller than the error of the cell in use, by more than twice the standard error of the difference.
        """
        self.sync()
        rows, priors = self._rated_choices(), self._priors()
        evidence = self._evidence(rows)
        if len(evidence) < MINIMUM:
            why = f"{len(evidence)} rated choices; training needs {MINIMUM}"
            return {"trained": False, "ratings": len(evidence), "reason": why}
        judging = np.array([zlib.crc32(row.reply_id.encode()) % 4 == 3 for row in rows])
        known, unseen = evidence.where(~judging), evidence.where(judging)
        new = train(RouterLoRA.fresh(INPUTS, len(ARMS)), known, priors, cancel=cancel)
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
        state, _ = self._store.routes.cell(*self._mine)
        self._store.routes.put_cell(*self._mine, new.to_bytes() if better else state, report)
        return report

    # -- status ------------------------------------------------------------------------------------------

    def status(self) -> RouterStatus:
        self.sync()
        chosen = self._store.routes.counts(*self._mine)
        recent = [turns for _, turns in self._store.routes.newest(*self._mine, _REPORT_CONVERSATIONS)]
        rng, empty = np.random.default_rng(0), np.zeros((0, INPUTS))
        shares = [bandit.choose(self._beliefs(t, self.offered), rng)[1] for t in recent or [empty]]
        best = dict(zip(self.offered, np.mean(shares, axis=0).tolist(), strict=True))
        arms = [
            ArmStatus(arm, chosen.get(arm, 0), known.count, known.mean_reward, best.get(arm, 0.0))
            for arm, known in zip(ARMS, self._arms, strict=True)
            if arm in best or chosen.get(arm)
        ]
        return RouterStatus(arms, self.offered[0], self._store.routes.cell(*self._mine)[1])


def _reward(reply_id: str, rating: str, counts: np.ndarray, latency_ratio: float) -> float:
    """Return the reward of a rating, ranked among the user's other ratings."""
    others = counts.copy()
    others[signal.INDEX[rating]] -= 1
    return signal.extract(reply_id, rating, others, latency_ratio=latency_ratio).reward
