"""This module is the optimizer of a runtime: it watches each reply, makes replies faster where a measurement
shows that this helps, and records each action in the witness log.

After each reply, `observe` adds the reply's figures to the monitor. If the median speed is below
TOKENS_PER_SECOND, idle time tries one knob after the other (knobs.py) on stored replies, with the values in
turns. A value that is at least 5% faster is kept, any other is put back. A kept value is put back later if
the replies became slower with it. The optimizer has no way of its own to learn or to choose KV tiers:
trainings (sona/), the router and the choice of tiers (kv_tuning/) have their own conditions, which status.py
shows.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..engine import GenerationResponse, LLMInferenceEngine
from ..engine.scheduler import PLACES, Scheduler
from ..errors import StoreError
from ..kv.pool import LOW
from ..kv_tuning.tier_review import TierReview
from ..pausing import Stopped, stop_when
from ..settings import Settings
from ..sona.learner import Learner
from ..sona.user_taste import reply_features
from ..store import KVObservation, OptimizerAction, SpeedRow, Store, Tuning
from ..tiers import HOT
from .action_log import ActionLog
from .knobs import BatchKnob, Knob, SpeculateKnob, ThreadsKnob
from .kv_levels import LevelRecorder
from .monitor import WINDOW, PerformanceMonitor
from .quality import PredictedStars, estimate
from .replay import SYSTEM_CLOCK, Clock
from .trials import GAIN, NothingToReplay, TrialResult, replays, try_batch, try_knob

TOKENS_PER_SECOND = 50.0  # below this median speed the optimizer tries to make replies faster
# A knob is tried again when the speed is below this share of the speed at its last trial.
SLOWER_AGAIN = 0.8
# A kept value is put back when the speed is below this share of the speed before it.
SLOWER_IN_USE = 0.9
ON, OFF, WATCH = "on", "off", "watch"  # the values of the setting `optimizer`
KV_TIERS = "kv_tiers"  # the knob that kv_tuning/ decides


class RealtimeOptimizer:
    """The optimizer of one model on one backend. Call its methods only in the runtime's thread."""

    def __init__(
        self,
        store: Store,
        engine: LLMInferenceEngine,
        settings: Settings,
        tiers: TierReview,
        scheduler: Scheduler,
        clock: Clock | None = None,
    ):
        """clock: the clock that trials read, in seconds; None: that of the system"""
        self._store, self._engine, self._tiers = store, engine, tiers
        self._clock = clock or SYSTEM_CLOCK
        self.mode, self.scheduler = settings.optimizer, scheduler
        mine = engine.model.fingerprint, engine.backend.name
        self._pool = engine.backend.pool
        self.monitor, self.log = PerformanceMonitor(store.kv.speeds(*mine, WINDOW)), ActionLog(store, *mine)
        self._levels = LevelRecorder(self.log, self._pool, lambda: engine.sessions.policy)
        self.knobs: list[Knob] = [
            SpeculateKnob(engine, settings), ThreadsKnob(engine, settings), BatchKnob(scheduler)
        ]  # fmt: skip
        self._use_kept()

    def _use_kept(self) -> None:
        """Set each knob to the value that the earlier trials on this machine chose."""
        for knob in self.knobs if self.mode == ON else ():
            if not knob.reason_against():
                knob.apply(self.value(knob))

    def _is_of_this_machine(self, tuning: Tuning) -> bool:
        return tuning.report.get("kernels") == self._engine.backend.kernels

    def value(self, knob: Knob) -> str:
        """Return the value of a knob that is in force."""
        tuning = self.log.tunings.get(knob.name)
        if tuning is None or not tuning.value or self.mode != ON or knob.reason_against():
            return knob.usual
        return tuning.value if self._is_of_this_machine(tuning) else knob.usual

    @property
    def in_force(self) -> dict[str, str]:
        """Return the values in force that differ from the usual ones, by the knobs' names."""
        return {knob.name: self.value(knob) for knob in self.knobs if self.value(knob) != knob.usual}

    # -- each reply ----------------------------------------------------------------------------------

    def with_quality(
        self, question: str, response: GenerationResponse, learner: Learner | None
    ) -> GenerationResponse:
        """Return the response, and the other samples in it, with their estimated quality."""
        everyone = [response, *response.others]
        judged = [
            _with_estimate(question, one, [o.text for o in everyone if o is not one], learner)
            for one in everyone
        ]
        return replace(judged[0], others=tuple(judged[1:]))

    def observe(self, seen: KVObservation, response: GenerationResponse) -> None:
        """Add a stored reply to the monitor, record what memory pressure has changed since the last reply,
        and put back kept values that made replies slower."""
        self.monitor.add(
            SpeedRow(
                seen.us_per_token, seen.ttft_ms, seen.written, seen.replies, seen.others, seen.pressure,
                response.kv.bytes, response.quality, time.time(),
            )
        )  # fmt: skip
        with contextlib.suppress(StoreError):  # the next reply does it
            self._levels.record()
            self._put_back_what_slowed()

    def _put_back_what_slowed(self) -> None:
        for knob in self.knobs:
            tuning = self.log.tunings.get(knob.name)
            if tuning is None or self.value(knob) == knob.usual:
                continue
            before, now = tuning.report.get("speed"), self._speed(knob, since=tuning.created)
            if before and now and now < SLOWER_IN_USE * before:
                self._put_back(knob, tuning, before, now)

    def _put_back(self, knob: Knob, tuning: Tuning, before: float, now: float) -> None:
        knob.apply(knob.usual)
        kept = self.log.newest_row(knob.name, "kept")
        why = f"replies are written at {now:.1f} tokens per second with it, {before:.1f} before it"
        action = OptimizerAction(knob.name, why, tuning.value, knob.usual, "undone", before, now, kept)
        self.log.put(Tuning(knob.name, "", tuning.report | {"speed": now}), action)

    def _speed(self, knob: Knob, since: float = 0.0) -> float | None:
        return self.monitor.shared_speed(since) if knob.name == BatchKnob.name else self.monitor.speed(since)

    # -- trials in idle time -------------------------------------------------------------------------

    def due_knob(self) -> Knob | None:
        """Return the next knob to try: replies are slow, and this knob was not tried at this speed yet."""
        if self.mode == OFF:
            return None
        return next((knob for knob in self.knobs if self._is_due(knob)), None)

    def _is_due(self, knob: Knob) -> bool:
        speed, tuning = self._speed(knob), self.log.tunings.get(knob.name)
        if speed is None or speed >= TOKENS_PER_SECOND or knob.reason_against():
            return False
        if tuning is None or not self._is_of_this_machine(tuning):
            return True
        was_watched = self.mode == ON and tuning.report.get("mode") == WATCH
        return was_watched or speed < SLOWER_AGAIN * tuning.report.get("speed", 0.0)

    def due_when_idle(self) -> bool:
        """Return True if the program should call `work` in idle time."""
        return self.due_knob() is not None or self.wants_tiers()

    def wants_tiers(self) -> bool:
        """Return True if replies are slow, and the measurement of KV tiers can help: the caches of the newest
        replies are at least so large, beside the weights, that fewer bytes can save 5% of the time."""
        speed, newest = self.monitor.speed(), self.monitor.newest()
        if self.mode != ON or speed is None or speed >= TOKENS_PER_SECOND or newest is None:
            return False
        is_large = newest.kv_bytes >= (GAIN - 1) * self._engine.backend.nbytes
        return is_large and self._tiers.can_choose()

    def work(self, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Try the knob that is due, or measure KV tiers. Return a report: {"knob", "outcome", "reason", ..}.
        The event `cancel` stops the trial within some tens of milliseconds; the next call begins it again."""
        knob = self.due_knob()
        if knob is None:
            return self._review_tiers(cancel)
        try:
            if self._pool is not None and self._pool.pressure() > LOW:
                return _no_trial(knob, "memory is short")
            with self._pool.same_level() if self._pool is not None else contextlib.nullcontext():
                found = self._try(knob, cancel)
        except Stopped:
            return _no_trial(knob, "stopped; the next idle time begins it again")
        except NothingToReplay:
            return _no_trial(knob, "no stored reply is long enough")
        finally:
            knob.apply(self.value(knob))
        return self._decide(knob, found)

    def _try(self, knob: Knob, cancel: threading.Event | None) -> TrialResult:
        known = replays(self._store, self._engine, stop_when(cancel), self._clock)
        if isinstance(knob, BatchKnob):
            return try_batch(knob, self.value(knob), known[0], self._room_for_replies())
        for replay in known:
            replay.shorten(self.monitor.speed() or TOKENS_PER_SECOND)
        return try_knob(knob, self.value(knob), known)

    def _room_for_replies(self) -> int:
        """Return the number of copies of a reply for whose new pages the budget has room, at least 1."""
        if self._pool is None or not self._pool.budget:
            return PLACES
        free = self._pool.budget - self._pool.nbytes
        return max(1, free // (2 * self._pool.sizes[HOT]))

    def _decide(self, knob: Knob, found: TrialResult) -> dict[str, Any]:
        """Keep the value if it was better, and write the action to the log."""
        speed = self._speed(knob)
        outcome = "watched" if self.mode == WATCH else "kept" if found.is_better else "put back"
        action = OptimizerAction(
            knob.name, f"{speed or 0.0:.1f} tokens per second; {found.why}",
            found.before, found.best, outcome, found.measured_before, found.measured_after,
            facts={"speed": speed, "target": TOKENS_PER_SECOND},
        )  # fmt: skip
        kept = found.value if outcome != "watched" and found.value != knob.usual else ""
        report = {"speed": speed, "mode": self.mode, "kernels": self._engine.backend.kernels}
        self.log.put(Tuning(knob.name, kept, report | {"candidates": found.candidates}), action)
        knob.apply(self.value(knob))
        return {"knob": knob.name, "outcome": outcome, "reason": found.why, "value": self.value(knob)}

    def _review_tiers(self, cancel: threading.Event | None) -> dict[str, Any]:
        """Measure KV tiers. kv_tuning/ chooses the policy of new caches and writes the choice to the log."""
        if not self.wants_tiers():
            return {"knob": None, "outcome": "none", "reason": "nothing is due"}
        report = self._tiers.review(cancel)
        outcome = "kept" if report["changed"] else "measured" if report["measured"] else "none"
        return {"knob": KV_TIERS, "outcome": outcome, "reason": report["reason"]}

    def close(self) -> None:
        """Record the changes that no reply has recorded yet."""
        self._levels.close()


def _no_trial(knob: Knob, reason: str) -> dict[str, Any]:
    return {"knob": knob.name, "outcome": "none", "reason": reason}


def _with_estimate(
    question: str, response: GenerationResponse, others: Sequence[str], learner: Learner | None
) -> GenerationResponse:
    found = estimate(question, response, _predicted_stars(question, response, learner), others)
    return replace(response, quality=found.value, quality_parts=found.parts) if found else response


def _predicted_stars(
    question: str, response: GenerationResponse, learner: Learner | None
) -> PredictedStars | None:
    """Return the stars that the taste model predicts for a reply. Return None before the first rating, and if
    the model raises an error. Return None also if the model is not fitted to the newest rating, because a
    reply must not wait for a fit."""
    model = learner.taste.fitted_model if learner is not None else None
    if model is None or not model.ratings:
        return None
    try:
        mean, deviation = model.predict([reply_features(question, response.text, response.finish_reason)])
    except Exception:  # noqa: BLE001 - the reply is worth more than its figures
        return None
    return PredictedStars(float(mean[0]), float(deviation[0]))
