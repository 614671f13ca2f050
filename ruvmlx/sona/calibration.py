"""This module calibrates a model: it measures, once per model, what learning needs to know about the model.
The calibration reads the model's hidden states over the reference text (reference_text.py) and over the
model's own replies to a few questions, without any adapter.

The calibration computes lora_a of the MicroLoRA, the coordinates in which ratings are added up
(coordinates.py), and the contexts: hidden states on which the KL to the frozen model is measured
(kl_probe.py).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..errors import RuvmlxError
from ..models.config.model import Model, Tokenizer
from ..pausing import Pause, ThreadedWork
from ..progress import QUIET, Told, Watch
from . import reference_text
from .kl_probe import Head, KLProbe, softmax_rows, spread_rows
from .prose_drift import Drift
from .reference_replies import ReferenceReplies
from .reference_text import Reading

ACTIVE = 2048  # the number of movable tokens (the likeliest tokens; ratings may change their logits)
FEATURES = 256  # the maximum number of directions in which the logits of similar tokens change together
PROBES = 1024  # if the hidden size is larger, features come from this number of random directions
# The largest and the smallest standard deviation of the prior of a token's weight.
MAX_PRIOR_DEVIATION, MIN_PRIOR_DEVIATION = 8.0, 0.003
RIDGE = 0.1  # the ridge of the regression for lora_a, as a share of a state's mean square
# numbers of contexts: in answers, in prose with the largest projections, in other prose
_CONTEXTS = 48, 48, 80
_ROWS = 64  # the number of hidden states in one call of the output head
# After HURRY or PATIENCE seconds of reading, the model starts no further text, if it has read
# MIN_TEXTS_OF_KIND texts of answers and of prose. Then the model writes replies for at most as many seconds.
# The number of seconds is HURRY if a rating waits, else PATIENCE for a model with SMALL or more parameters. A
# model with fewer than SMALL parameters reads all texts and writes all replies, unless a rating waits.
SMALL, PATIENCE, HURRY, MIN_TEXTS_OF_KIND = 1_000_000_000, 20.0, 10.0, 2
WHAT = "Getting to know the model, once"


@dataclass(frozen=True)
class Measured:
    """The model to measure, with its backend and tokenizer. rank: the rank of lora_a."""

    backend: Backend
    tokenizer: Tokenizer
    rank: int
    max_context: int
    parameters: int = 0

    @classmethod
    def of(cls, model: Model, backend: Backend, rank: int) -> "Measured":
        """Return what the measurement needs to know about a model and the backend that runs the model."""
        return cls(backend, model.tokenizer, rank, model.shape.max_context, model.parameters)


class Measurement:
    """The measurement of one model's KL probe. The model reads about 2,700 tokens of text and writes replies
    of 1,900 tokens in batches (fewer if a large or slow model takes too long). Then the output head reads all
    hidden states, and the states of prose a second time. The measurement can be stopped at any time and
    continued."""

    def __init__(self, model: Measured):
        self._model, self._reading = model, Reading()
        self._replies = ReferenceReplies(model.backend, model.tokenizer, model.max_context)
        self._spent, self._written = 0.0, 0.0  # seconds of reading and of writing so far
        self._patience = inf
        self._survey: Survey | None = None
        self._rest: _AfterSurvey | None = None

    def run(self, pause: Pause | None = None, watch: Watch = QUIET, is_hurried: bool = False) -> KLProbe:
        """Run the steps of the measurement that are not done yet, and return the KL probe. `pause` can raise
        an exception to stop. is_hurried: True if a rating waits; the measurement then reads fewer texts on a
        slow machine, and `pause` is called only between two steps, so that each call of `run` completes a
        step. Raises RuvmlxError if the model's weights are damaged."""
        patience = PATIENCE if self._model.parameters >= SMALL else inf
        self._patience = min(patience, HURRY) if is_hurried else patience
        order = _order([bool(question) for question, _ in reference_text.texts()])
        count = Told(watch, WHAT, len(order) + len(reference_text.questions()), "texts")
        count.add(len(self._reading.states) + self._replies.done)

        def pausing() -> None:
            if pause is not None:
                pause()
            count.add(0)

        # Without a pause and a watch, the model reads each text without stops, which is faster.
        waits = pause is not None or watch is not QUIET
        for done, index in enumerate(order):
            if self._is_enough(done):
                break
            if index not in self._reading.states:
                self._read(index, pausing if waits else None, stops_inside=not is_hurried)
                count.add(1)
        self._write_replies(pausing, count)
        few = len(self._reading.states) < len(order)
        count.begin(f"{WHAT} ({len(self._reading.states)} of {len(order)} texts)" if few else WHAT, 0)
        return self._make_probe(pausing)

    def _is_enough(self, texts: int) -> bool:
        return texts >= 2 * MIN_TEXTS_OF_KIND and self._spent > self._patience

    def _read(self, index: int, pause: Pause | None, stops_inside: bool) -> None:
        started, model = time.perf_counter(), self._model
        try:
            self._reading.read(
                index, model.backend, model.tokenizer, model.max_context, pause, stops_inside=stops_inside
            )
        finally:
            self._spent += time.perf_counter() - started

    def _write_replies(self, pause: Pause, count: Told) -> None:
        started, before = time.perf_counter(), self._written

        def is_enough() -> bool:
            self._written = before + time.perf_counter() - started
            return self._written > self._patience

        self._replies.write(pause, count.add, is_enough)

    def _make_probe(self, pause: Pause) -> KLProbe:
        head = self._model.backend.head
        if self._survey is None:
            text = self._reading.concatenate()
            if not (np.isfinite(text.states).all() and np.isfinite(text.ends).all()):
                raise RuvmlxError(
                    "the model computes NaN or Inf on plain text: its weights are damaged. Fetch it again."
                )
            every = np.concatenate([text.states, text.ends, *(row[None] for row in self._replies.states)])
            self._survey = Survey(every, sorted(self._model.tokenizer.eos_ids))
        surveyed = self._survey.run(head, pause)
        self._rest = self._rest or _AfterSurvey(self._model, self._reading, self._survey.states, surveyed)
        return self._rest.run(pause)


class _AfterSurvey:
    """The steps of a measurement after the survey. `run` can be stopped and continued: the object keeps the
    results of the steps that are done. Steps without the model run in a thread of their own, so that the
    caller of `run` can do other work in the meantime."""

    def __init__(self, model: Measured, reading: Reading, every: np.ndarray, surveyed: "Surveyed"):
        """every: [T, D], all hidden states of the survey: in texts, at the texts' ends, in replies"""
        self._model, self._reading, self._text = model, reading, reading.concatenate()
        ends, text = sorted(model.tokenizer.eos_ids), self._text
        self._ends = np.array(ends)
        self._frequency = surveyed.frequency
        self._tokens, self._precision = prior(surveyed.frequency, surveyed.cost, ends)
        written = np.ones(len(every) - len(text.states) - len(text.ends), bool)
        in_reply = np.concatenate([np.arange(len(text.states)) < text.answers, text.is_answer, written])
        self._directions = ThreadedWork(
            lambda: directions(every, in_reply, surveyed.ending)[:, : model.rank].copy()
        )
        self._head_rows = HeadRows(text.states.shape[1], self._tokens)
        self._features: ThreadedWork[np.ndarray] | None = None
        self._drift: Drift | None = None

    def run(self, pause: Pause) -> KLProbe:
        """Run the steps that are not done yet, and return the KL probe. `pause` can raise an exception to
        stop."""
        head, text = self._model.backend.head, self._text
        rows = self._head_rows.run(head, pause)
        self._features = self._features or ThreadedWork(lambda: features(rows, self._frequency[self._tokens]))
        along, reading, n = self._features.wait(pause), self._directions.wait(pause), text.answers
        self._drift = self._drift or Drift(text.states[n:], text.following[n:], reading, self._tokens)
        drift = self._drift.run(head, pause)
        chosen, counts = states_to_measure(text.states @ reading, n)
        return KLProbe(
            np.ascontiguousarray(text.states[chosen]), chosen, counts, np.array(len(text.states) - n),
            text.following[chosen], reading, self._tokens, self._ends,
            np.concatenate([self._precision, np.ones(along.shape[1], np.float32)]), along,
            drift, head, read_texts=self._reading.read_texts,
        )  # fmt: skip


def measure(backend: Backend, tokenizer: Tokenizer, rank: int, max_context: int) -> KLProbe:
    """Measure the KL probe of a model without stops, and return the probe."""
    return Measurement(Measured(backend, tokenizer, rank, max_context)).run()


def _order(is_answer: Sequence[bool]) -> list[int]:
    """Return the order in which the model reads the texts, as indices: first MIN_TEXTS_OF_KIND texts of each
    kind (answers, prose), then a text of each kind in turn."""
    kinds = [[i for i, answer in enumerate(is_answer) if answer is kind] for kind in (True, False)]
    head = [i for kind in kinds for i in kind[:MIN_TEXTS_OF_KIND]]
    turns = [
        i
        for pair in zip_longest(*(kind[MIN_TEXTS_OF_KIND:] for kind in kinds))
        for i in pair
        if i is not None
    ]
    return head + turns


@dataclass(frozen=True)
class Surveyed:
    """The results of a survey, which reads the model's predictions at all hidden states [T, D] (T positions,
    D hidden size). V is the vocabulary size.

    frequency: [V], the mean probability of each token
    cost: [V], the mean p (1 - p) of each token
    ending: [T], the log-probability that the reply ends at each state
    """

    frequency: np.ndarray
    cost: np.ndarray
    ending: np.ndarray


class Survey:
    """A computation of every token's probability at every hidden state. The survey can be stopped and
    continued."""

    def __init__(self, states: np.ndarray, ends: list[int]):
        self.states, self._ends, self._at = states, ends, 0
        self._frequency: Any = 0.0
        self._cost: Any = 0.0
        self._ending: list[np.ndarray] = []

    def run(self, head: Head, pause: Pause) -> Surveyed:
        """Run the survey and return its results. `pause` can raise an exception to stop; the next call
        continues."""
        while self._at < len(self.states):
            # float32 is exact enough for the softmax of 64 rows, and takes a quarter of the time of float64
            p = softmax_rows(head(self.states[self._at : self._at + _ROWS]))
            mean = p.sum(axis=0)
            self._ending.append(np.log(p[:, self._ends].sum(axis=1, dtype=np.float64) + 1e-5))
            self._frequency = self._frequency + mean.astype(np.float64)
            np.square(p, out=p)
            self._cost = self._cost + (mean - p.sum(axis=0)).astype(np.float64)
            self._at += _ROWS
            pause()
        n = len(self.states)
        return Surveyed(self._frequency / n, self._cost / n, np.concatenate(self._ending))


def prior(frequency: np.ndarray, cost: np.ndarray, ends: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens [A], precision [A]): the A movable tokens, and the precision of the prior of each
    token's weight.

    precision is 1 / sigma^2; sigma is the standard deviation of the prior of a token's weight. Tokens that
    occur in nearly all replies mostly show a style; rare tokens mostly show a topic. Every complete reply has
    the end-of-reply token. So sigma is smaller for tokens that are rarer than the end-of-reply token. Sigma
    is also smaller for tokens with a larger `cost` (Surveyed) than the end-of-reply token, because a change
    of these tokens' logits adds more KL.
    """
    tokens = np.sort(np.argsort(-frequency, kind="stable")[:ACTIVE])
    end = max(ends, key=lambda t: frequency[t])
    common = np.minimum(1, frequency[tokens] / frequency[end])
    cheap = np.minimum(1, cost[end] / np.maximum(cost[tokens], 1e-12))
    sigma = np.maximum(MAX_PRIOR_DEVIATION * common * cheap, MIN_PRIOR_DEVIATION)
    return tokens.astype(np.int32), (sigma**-2).astype(np.float32)


def states_to_measure(readings: np.ndarray, answers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the hidden states on which KL is measured. Also return how many of these states
    are in answers, how many are in prose and have the largest projections, and how many are in other prose.

    readings: [T, r], the projections of all states onto lora_a; the first `answers` states are in answers. In
        prose, most projections are near zero. At the few states with large projections, an adapter changes
        the prose most, so the states with the largest projections are all chosen.
    """
    most_read, prose = answers + np.argsort(-np.sum(readings[answers:] ** 2, axis=1)), len(readings) - answers
    loud = np.sort(most_read[: min(_CONTEXTS[1], prose)])
    groups = [spread_rows(np.arange(answers), _CONTEXTS[0]), loud]
    groups.append(spread_rows(np.sort(most_read[len(loud) :]), _CONTEXTS[2]))
    return np.concatenate(groups).astype(np.int32), np.array([len(g) for g in groups])


def directions(states: np.ndarray, in_reply: np.ndarray, ending: np.ndarray) -> np.ndarray:
    """Return lora_a [D, 2], computed from hidden states [T, D]. The two columns read two facts from a state:
    whether the state is in a reply, and how near the end of that reply is.

    The columns are ridge regressions of in_reply [T] and, inside replies, of ending [T]. The targets of both
    regressions are 0 in prose outside replies, because ratings say nothing about this prose. Over the states
    in replies, the projection onto the first column has mean 1, and the projection onto the second column has
    standard deviation 1.
    """
    states, replies = states.astype(np.float64), np.flatnonzero(in_reply)
    weight = np.where(in_reply, 1 / in_reply.sum(), 1 / max(1, (~in_reply).sum()))
    gram = (states * weight[:, None]).T @ states
    ridge = gram + RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    nearness = np.where(in_reply, ending - ending[replies].mean(), 0.0)
    found = np.linalg.solve(ridge, states.T @ (weight[:, None] * np.stack([in_reply, nearness], axis=1)))
    u = states[replies] @ found
    return (found / np.maximum([abs(u[:, 0].mean()), u[:, 1].std()], 1e-9)).astype(np.float32)


class HeadRows:
    """A computation of the rows of the output head that belong to the A movable tokens: for a hidden size of
    at most PROBES, the rows themselves [D, A]; for a larger hidden size, their projections onto random
    directions [PROBES, A]. The computation can be stopped and continued."""

    def __init__(self, width: int, tokens: np.ndarray):
        """width: the hidden size D. tokens: [A], the ids of the movable tokens."""
        self._inputs = np.eye(width, dtype=np.float32) if width <= PROBES else _combinations(width)
        self._tokens, self._rows = tokens, list[np.ndarray]()

    def run(self, head: Head, pause: Pause) -> np.ndarray:
        """Return the rows. `pause` can raise an exception to stop; the next call continues."""
        while len(self._rows) * _ROWS < len(self._inputs):
            start = len(self._rows) * _ROWS
            self._rows.append(head(self._inputs[start : start + _ROWS]).take(self._tokens, axis=1))
            pause()
        return np.concatenate(self._rows)


def features(rows: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """Return the k directions [A, k] float32 in which the logits of the A movable tokens change together.

    rows: the result of HeadRows
    frequency: [A], the mean probability of each movable token

    The directions are the principal directions of these tokens' rows in the output head, weighted by
    frequency, because words of one kind have similar rows. Each direction has variance 1 over tokens drawn by
    `frequency`, so a step along any of the directions adds about the same KL.
    """
    p = (frequency / frequency.sum()).astype(np.float32)
    rows = rows.T - rows @ p
    variance, axes = np.linalg.eigh(((rows * p[:, None]).T @ rows).astype(np.float64))
    kept = np.flatnonzero(variance > 1e-6 * variance[-1])[-FEATURES:]
    return np.ascontiguousarray(rows @ (axes[:, kept] / np.sqrt(variance[kept])), np.float32)


def _combinations(width: int) -> np.ndarray:
    """Return PROBES random directions [PROBES, width], which are the same on every machine. The projection of
    two rows of the output head onto these directions changes their dot product by about 3% of the product of
    their lengths."""
    signs = np.random.Generator(np.random.PCG64(1)).integers(0, 2, (PROBES, width), dtype=np.int8)
    return (2 * signs.astype(np.float32) - 1) / np.float32(np.sqrt(PROBES))
