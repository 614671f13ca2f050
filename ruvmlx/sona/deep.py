"""After a task (ratings about similar things), or a week after its last run, the deep loop tidies the
reasoning bank and, if EWC is on, stores an EWC anchor.

An anchor says how important each weight of the base LoRA is for the task's liked replies (optional/ewc.py).
The deep loop measures this importance with one gradient per reply. If EWC is on, the background loop
penalises changes of the weights that an anchor calls important. The deep loop also clusters the rated
questions of the reasoning bank (reasoning_bank.py) again into patterns. The loop merges similar patterns. The
loop prunes poor patterns (patterns of mostly disliked replies), so that lookups skip their questions. The
loop deletes no rating.

The deep loop can be stopped between two slices (short parts of the work on one reply). The same process
resumes after the last complete reply; another process resumes after the last saved reply.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CorruptFile
from ..lora.base_lora import BaseLoRA
from ..lora.merge import HEAD
from ..models.config.model import Model
from ..pausing import MemoryRanOut, Pause, Stopped, stop_reason, stop_when
from ..training.trainer import Trainer
from . import replay
from .adapter_history import MINIMUM
from .learner import Learner
from .reasoning_bank import Tidied
from .replay import Buffer, RatedExample
from .task_boundary import boundaries
from .weight_anchors import Importance

WEEK = 7 * 86400.0  # the number of seconds in a week
REPLIES = 64  # the maximum number of liked replies to measure; only the newest liked replies are measured
MIN_LIKED_REPLIES = 3  # the minimum number of liked replies for an anchor
SAVE_EVERY = 8  # the number of measured replies from one save of a run to the next

Progress = Callable[[int, int], None]  # (replies measured so far, all replies to measure)


@dataclass(frozen=True)
class Task:
    """The liked replies to measure, which were rated between the last anchor and the newest task boundary. A
    task is a series of ratings about similar things (task_boundary.py).

    examples: liked replies, the oldest first
    boundary: the adapter version whose rating began the newest task; None if no task has begun since the last
        anchor
    """

    examples: list[RatedExample]
    boundary: int | None


@dataclass
class FisherRun:
    """A measurement, in progress, of the importance of the base LoRA's weights (Fisher information).

    facts: the base LoRA and the replies; a stopped measurement is resumed only if both are the same
    fisher: the importance, estimated from the replies that were measured so far
    """

    facts: dict[str, Any]
    fisher: Importance

    def to_bytes(self) -> bytes:
        return json.dumps(self.facts).encode() + b"\n" + self.fisher.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, read: Callable[[bytes], Importance]) -> "FisherRun | None":
        """Decode a stored measurement. Return None if the data is damaged; the caller then starts a new
        measurement."""
        try:
            facts, _, fisher = data.partition(b"\n")
            return cls(json.loads(facts), read(fisher))
        except (ValueError, CorruptFile):
            return None


class Deep:
    """The deep loop of one learner. Only the backend's thread can use this object."""

    def __init__(self, learner: Learner, model: Model):
        self._learner, self._model = learner, model
        self._paused: FisherRun | None = None
        self._trainer: Trainer | None = None  # the trainer is kept while a run is stopped
        # (the history's version, and the result of `task_starts` for this version)
        self._seen: tuple[int, list[int]] = (-1, [])

    @property
    def is_paused(self) -> bool:
        """True if this object holds a stopped run, which the next `run` can resume."""
        return self._paused is not None

    def close(self) -> None:
        """Save a stopped run in the store."""
        if self._paused is not None:
            self._learner.history.deep.put_measurement(self._paused.to_bytes())
        self._paused = None
        self._free()

    def _free(self) -> None:
        """Free the graph that computes gradients."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None

    # -- when ----------------------------------------------------------------------------------------

    def why_due(self, now: float | None = None) -> str:
        """Return the reason why the deep loop should run now; "" if it need not run. now: the time in seconds
        since 1970."""
        history = self._learner.history
        ratings, last = history.ratings(), history.deep.last_run()
        version = last.version if last else 0
        if len(ratings) < MINIMUM or ratings[-1].version_after <= version:
            return ""
        if self.is_paused or history.deep.measurement() is not None:
            return "it was stopped"
        if max(self.task_starts(), default=0) > version:
            return "a new task began"
        since = last.created if last else history.first_rating() or 0.0
        # `abs`, because the clock may have been wrong in the last run
        return "a week has passed" if abs((now or time.time()) - since) >= WEEK else ""

    def task_starts(self) -> list[int]:
        """Return the adapter versions whose ratings began a new task (`Task`), the oldest first. The result
        is cached until the adapter version in use changes."""
        history, index = self._learner.history, self._learner.rating_index
        if self._seen[0] != (version := history.version()):
            ratings = history.ratings()[-replay.LIMIT :]
            questions = np.zeros((len(ratings), index.whitening.dimensions), np.float32)
            for row, rating in zip(questions, ratings, strict=True):
                if (known := index.vector(rating.reply_id)) is not None:
                    row[:] = known
            rewards = [index.reward(r.reply_id, r.rating) for r in ratings]
            self._seen = version, [ratings[i].version_after for i in boundaries(rewards, questions)]
        return self._seen[1]

    def _buffer(self, pause: Pause = lambda: None) -> Buffer:
        learner, model = self._learner, self._model
        return replay.load(
            learner.history, learner.rating_index, model.tokenizer, model.shape.max_context, pause
        )

    # -- a run ---------------------------------------------------------------------------------------

    def run(
        self, progress: Progress | None = None, cancel: threading.Event | None = None, anchor: bool = True
    ) -> dict[str, Any]:
        """Measure the importance of the weights for the task, store an anchor if that is possible, and tidy
        the reasoning bank. Return a report, which says why there is no anchor or why the run was stopped.

        anchor: False to tidy the reasoning bank without an anchor
        """
        learner, started = self._learner, time.perf_counter()
        pause = learner.room.guard(stop_when(cancel))
        learner.sync()
        try:
            pause()
            buffer = self._buffer(pause)
        except Stopped:
            return _report(False, "stopped before it began")
        if (ratings := len(buffer.train) + len(buffer.held_out)) < MINIMUM:
            return _report(False, f"at least {MINIMUM} rated replies are needed; there are {ratings}")
        task, base = self._task(buffer), _without_head(learner.base)
        measuring = self._measuring(task)
        try:
            why = self._objection(task, base) if anchor else "EWC is off, so no anchor is needed"
            if not why and base is not None:
                self._measure(measuring, task, base, progress, pause)
            report = self._finish(measuring, task, why, pause)
        except Stopped as stop:
            self._paused = measuring  # `close` saves the run, because a save here would take too long
            if isinstance(stop, MemoryRanOut):
                self.close()
            done = f"stopped after {measuring.fisher.examples} of {len(task.examples)} replies"
            return _report(False, stop_reason(stop, done + "; the next run continues it"))
        self._paused = None
        self._free()
        return report | {"seconds": time.perf_counter() - started}

    def _task(self, buffer: Buffer) -> Task:
        """Return the task to measure: the liked replies since the last anchor, up to the newest task
        boundary, without held-out replies."""
        since = self._learner.anchors.last_version()
        boundary = max((v for v in self.task_starts() if v > since + 1), default=None)
        mine = [e for e in buffer.train if e.version > since and (boundary is None or e.version < boundary)]
        liked = sorted((e for e in mine if e.reward > e.value), key=lambda e: e.version)
        return Task(liked[-REPLIES:], boundary)

    def _objection(self, task: Task, base: BaseLoRA | None) -> str:
        """Return why no anchor can be stored; "" if an anchor can be stored."""
        if base is None or not base.pairs:
            return "nothing has been consolidated yet, so there is nothing to protect"
        if len(task.examples) < MIN_LIKED_REPLIES:
            liked = len(task.examples)
            return f"an anchor needs {MIN_LIKED_REPLIES} liked replies since the last one; there are {liked}"
        return ""

    def _measuring(self, task: Task) -> FisherRun:
        """Return the stopped measurement if it has the same base LoRA and replies, else a new measurement."""
        state, history = self._learner.state, self._learner.history
        facts = {"base": state.base, "replies": [e.reply_id for e in task.examples]}
        known, self._paused = self._paused, None
        if known is None and (data := history.deep.measurement()):
            known = FisherRun.from_bytes(data, self._learner.anchors.read_importance)
        return (
            known
            if known is not None and known.facts == facts
            else FisherRun(facts, self._learner.anchors.new_importance())
        )

    def _measure(
        self, measuring: FisherRun, task: Task, base: BaseLoRA, progress: Progress | None, pause: Pause
    ) -> None:
        """Measure the importance of the weights for the replies that were not measured yet, and add this
        importance to `measuring`."""
        todo, total = task.examples[measuring.fisher.examples :], len(task.examples)
        if not todo:
            return
        pause()
        if self._trainer is None:
            self._learner.room.check()
            self._trainer = Trainer(self._model, backend=self._learner.backend, pause=pause)
        self._trainer.set_head(self._learner.base, self._learner.micro)
        pause()
        for example in todo:
            measuring.fisher.add(self._trainer.squares(base, example.text, pause))
            done = measuring.fisher.examples
            pause()
            if done % SAVE_EVERY == 0 and done < total:
                self._learner.history.deep.put_measurement(measuring.to_bytes())
                pause()
            if progress is not None:
                progress(done, total)

    def _finish(self, measuring: FisherRun, task: Task, why: str, pause: Pause) -> dict[str, Any]:
        """Tidy the reasoning bank. Store the anchor (if the run made one), the labels of the entries that
        were pruned from lookups, and the report in one transaction. Return the report."""
        learner = self._learner
        if not why and not measuring.fisher.finite:
            why = "the measured importance is not finite"
        tidied, pruned = learner.rating_index.tidy(pause)
        anchored = not why
        anchors = min(learner.anchors.limit, len(learner.anchors.ids()) + anchored)
        reason = why or f"anchored on {len(task.examples)} liked replies"
        report = _report(anchored, reason, tidied, anchors=anchors, boundary=task.boundary)
        report["examples"] = len(task.examples)
        fisher, state = measuring.fisher if anchored else None, learner.state
        if not learner.anchors.end_run(state.version, state.base, fisher, report, pruned):
            return _report(False, "the adapter was changed meanwhile; nothing was done")
        return report


def _without_head(base: BaseLoRA | None) -> BaseLoRA | None:
    """Return the base LoRA without its change of the output head, because the trainer computes no gradient of
    the head."""
    if base is None:
        return None
    return BaseLoRA({place: pair for place, pair in base.pairs.items() if place != HEAD}, base.scale)


def _report(anchored: bool, reason: str, tidied: Tidied | None = None, **more: Any) -> dict[str, Any]:
    found = {"patterns": tidied.patterns, "merged": tidied.merged, "pruned": tidied.pruned} if tidied else {}
    return {"anchored": anchored, "reason": reason, **found, **more}
