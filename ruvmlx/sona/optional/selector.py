"""The model selector chooses which of several models answers a question (`--model auto`). The selector learns
from the ratings and latencies of earlier replies.

An arm is a model. The selector is the bandit of router.py with other features and another prior. The smallest
model, the reader, embeds the questions. FastGRNN reads the newest turns. An arm's features are FastGRNN's
state and the newest turn itself: the question's vector, its length, and the length of the conversation.

The reward of a rating is the router's, with a milder latency, because models differ more in their speed than
the replies of one model:
    reward = quality * (1 - WAIT * log2(ms / usual))
ms is the reply's time per token, and `usual` is the geometric mean of the models' median times. A model that
takes four times as long must be liked by about 2 * WAIT more.

Before any rating, a model with half as many parameters is expected to earn HALF_SIZE less than the larger
one, so the largest model is preferred. If two models are rated alike, the faster model wins. Until the first
rating, the largest model answers each question, because a try would teach nothing.

A small model that is unsure of its answer hands the question to a larger one. How unsure it is, the mean
log-probability of its first 16 tokens shows. Measured with 96 questions of fact (`python -m
tests.sona.handover_study`), the starter and Qwen 2.5 0.5B: right were 55% and 64% of the answers. The mean
log-probability separates right from wrong answers of the starter with an AUC of 0.66 (95% interval about 0.55
to 0.77; chance is 0.5).

    threshold   handed on   starter right there   Qwen right there   right in all
      -0.80        10%             20%                  60%               59%
      -0.63        30%             38%                  48%               58%
      -0.56        40%             34%                  53%               62%
      -0.39        70%             51%                  60%               61%

The threshold in use hands on few questions. The gain, 4 of 96 answers, is small.

The selector depends only on the ratings in force and on the trained cell, as the router does. So a rating
that is taken back leaves no trace. All sets of models with the same reader share their ratings. Each set has
its own cell.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from ...models.config.model import Message
from ...store import ModelChoiceRow, RatedModelChoice, RatedRoute, Store
from . import bandit, fastgrnn, router
from .bandit import Regression
from .router import ArmChooser, RouterStatus, turns_of

INPUTS = router.INPUTS + 2  # the router's inputs for a turn, the turn's length, the conversation's length
WAIT = 0.05  # the part of a reward that a reply loses if it takes twice the usual time
HALF_SIZE = 0.1  # the prior reward that a model loses against a model with twice as many parameters
LOWEST_MEAN = 0.2  # the smallest prior mean of an arm
WEIGHT_SD = 0.1  # the prior standard deviation of each feature's weight
# How freely the selector tries a model that seems worse (bandit.choose). With eight simulated users of
# tests/sona/selector_study.py, 300 ratings each, the selector lost 15% of the best reward with 1, 12% with
# 0.5 and 10% with 0.25. With 0.25, a change of the user's taste would be noticed late.
EXPLORE = 0.5
_USUAL_LETTERS = 4.7  # the natural logarithm of 110 letters
SURE = 0.9  # a model of which the selector is so sure keeps its question, however unsure its first tokens are
# the mean log-probability of a small model's first tokens below which it hands the question to a larger
# model; None: it never does
UNSURE_LOGPROB: float | None = -0.8


@dataclass(frozen=True)
class SelectorModel:
    """A model from which the selector chooses. name: the name to show; context: its number of tokens."""

    fingerprint: str
    name: str
    parameters: int
    context: int


@dataclass(frozen=True, eq=False)
class ModelChoice:
    """The choice of a model for one reply.

    confidence: the probability that this model is the best for the question. why: the reason, in words
    best: {fingerprint: the probability that this model is the best}. turns: the cell's input
    """

    model: SelectorModel
    confidence: float
    why: str
    turns: np.ndarray
    best: dict[str, float]

    @property
    def line(self) -> str:
        return f"{self.model.name}: {self.why}"

    @property
    def facts(self) -> dict[str, object]:
        """The choice as the field `selector` of JSON."""
        return {"model": self.model.name, "confidence": round(self.confidence, 4), "why": self.why}

    def row(self, reply_id: str, reader: str, ms: float) -> ModelChoiceRow:
        return ModelChoiceRow(
            reply_id, reader, self.model.fingerprint, self.confidence, ms, self.turns, self.best
        )

    def handed_to(self, other: SelectorModel) -> "ModelChoice":
        """Return the choice of another model, because this model was unsure of its answer."""
        why = f"{self.model.name} was unsure of its answer"
        return replace(self, model=other, confidence=self.best.get(other.fingerprint, 0.0), why=why)


def turns_for(messages: Sequence[Message], vector_of: Callable[[str], np.ndarray | None]) -> np.ndarray:
    """Return the cell's input for the newest turns of a conversation: [T, INPUTS] float32. The parameters are
    those of `router.turns_of`."""
    turns = turns_of(messages, vector_of)
    letters = np.array([len(m.content) for m in messages if m.role in ("user", "assistant")])
    lengths = np.stack([letters, np.cumsum(letters)], axis=1)[len(letters) - len(turns) :]
    return np.concatenate([turns, np.log1p(lengths) - _USUAL_LETTERS], axis=1).astype(np.float32)


class ModelSelector(ArmChooser):
    """The selector of one set of models. The selector needs only the store and not the models' weights."""

    explore = EXPLORE

    def __init__(self, store: Store, models: Sequence[SelectorModel]):
        """models: the models of the set, in any order; the smallest is the reader."""
        self.models = sorted(models, key=lambda model: (model.parameters, model.fingerprint))
        self.reader = self.models[0].fingerprint
        arms = tuple(model.fingerprint for model in self.models)
        name = hashlib.sha256(" ".join(sorted(arms)).encode()).hexdigest()[:16]
        super().__init__(store, (f"auto:{name}", "auto"), arms, INPUTS, direct=True)

    def model(self, fingerprint: str) -> SelectorModel:
        return self.models[self.arms.index(fingerprint)]

    def _priors(self) -> list[Regression]:
        largest = self.models[-1].parameters
        means = [
            max(LOWEST_MEAN, bandit.DEFAULT_MEAN - HALF_SIZE * np.log2(largest / model.parameters))
            for model in self.models
        ]
        size = 1 + fastgrnn.HIDDEN + INPUTS
        return [Regression.prior(size, float(mean), WEIGHT_SD) for mean in means]

    def _mark(self) -> object:
        return self._store.model_choices.rated_mark(self.reader)

    def _rated_choices(self) -> list[RatedRoute]:
        return with_latency([row for row in self._all_rated() if row.arm in self.arms])

    def _all_rated(self) -> list[RatedModelChoice]:
        return self._store.model_choices.rated_choices(self.reader, router.WINDOW)

    def _labels(self, rows: list[RatedRoute]) -> list[str]:
        return [row.rating for row in rows]

    @property
    def has_ratings(self) -> bool:
        """True if a reply of one of the models has a rating in force."""
        self.sync()
        return any(arm.count for arm in self._arms)

    def choose(
        self, turns: np.ndarray, seed: int | None = None, arms: tuple[str, ...] | None = None
    ) -> ModelChoice:
        """Choose a model for a conversation [T, INPUTS]. arms: the fingerprints of the models from which to
        choose; None: all. The same seed (not None), conversation, ratings and cell give the same choice."""
        offered = arms or self.arms
        arm, best = self.draw(turns, offered, seed)
        if len(offered) == 1:
            why = "no other model has room for this chat"
        elif not self.has_ratings:
            arm, why = offered[-1], "it is the largest, and no reply is rated yet"
        else:
            why = self._reason(arm, best)
        return ModelChoice(self.model(arm), best[arm], why, turns, best)

    @staticmethod
    def _reason(arm: str, best: dict[str, float]) -> str:
        sure = f"{round(100 * best[arm])}% sure"
        if best[arm] == max(best.values()):
            return f"it answers such questions better, {sure}"
        return f"a try, {sure} that it answers such questions better"

    def train_if_due(self, every: int) -> None:
        """Train the cell if there are `every` rated choices more than at its last training."""
        self.sync()
        rated = sum(arm.count for arm in self._arms)
        before = self._store.routes.cell(*self._cell)[1].get("ratings", 0)
        if rated >= router.MINIMUM and rated - before >= every:
            self.train()

    def best_larger(self, choice: ModelChoice, arms: tuple[str, ...]) -> SelectorModel | None:
        """Return the larger model, among `arms`, to which the chosen model may hand the question: the one
        with the largest expected reward. Return None if there is no larger model, or if the choice is
        sure."""
        larger = [a for a in arms if self.model(a).parameters > choice.model.parameters]
        if not larger or UNSURE_LOGPROB is None or (self.has_ratings and choice.confidence >= SURE):
            return None
        means = [mean for mean, _ in self.beliefs(choice.turns, tuple(larger))]
        return self.model(larger[int(np.argmax(means))])

    def status(self) -> RouterStatus:
        """Return the status of the models' arms, with the models' names."""
        chosen = self._store.model_choices.counts(self.reader)
        newest = self._store.model_choices.newest(self.reader, router.REPORT_CONVERSATIONS)
        recent = [turns for _, turns in newest if turns.shape[1] == INPUTS]
        found = self.statuses(self.arms, chosen, recent)
        arms = [replace(status, arm=self.model(status.arm).name) for status in found]
        return RouterStatus(arms, self.models[-1].name, self._store.routes.cell(*self._cell)[1])


def is_unsure(logprobs: Sequence[float]) -> bool:
    """Return True if a small model is unsure of its answer. logprobs: the log-probabilities of the answer's
    first tokens."""
    if UNSURE_LOGPROB is None or not logprobs:
        return False
    return sum(logprobs) / len(logprobs) < UNSURE_LOGPROB


def with_latency(rows: Sequence[RatedModelChoice]) -> list[RatedRoute]:
    """Return the choices with the latency ratio of the module's docstring: 1 + WAIT * log2(ms / usual)."""
    times = [median(r.ms for r in rows if r.arm == arm and r.ms > 0) for arm in _arms_with_times(rows)]
    usual = float(np.exp(np.mean(np.log(times)))) if times else 1.0
    return [
        RatedRoute(r.reply_id, r.arm, r.turns, r.rating, 1 + WAIT * float(np.log2((r.ms or usual) / usual)))
        for r in rows
    ]


def _arms_with_times(rows: Sequence[RatedModelChoice]) -> list[str]:
    """Return the arms with a known time, in the order of their first choice."""
    return list(dict.fromkeys(row.arm for row in rows if row.ms > 0))
