"""This module applies the measured choice of a KV policy to new KV caches, if the backend has tiers
(precisions of KV pages; tier_measurement.py)."""

import threading
from typing import Any

from ..backends.select import asked_policy, cache_policy
from ..engine import GenerationResponse, LLMInferenceEngine
from ..settings import Settings
from ..store import KVObservation, Store
from .tier_choice import KVStatus
from .tier_measurement import KVLoop, TierHistory


class TierReview:
    """A review of KV policies, which sets the policy of an engine's sessions to the measured choice. If the
    user asked for a policy, that policy stays in use."""

    def __init__(self, store: Store, engine: LLMInferenceEngine, settings: Settings):
        """Raises UsageError if the settings of the KV tiers are invalid."""
        model, backend = engine.model, engine.backend
        asked = asked_policy(settings.kv, model.shape, settings.kv_tiers)
        policy = cache_policy(settings.kv, backend, model.shape, settings.kv_tiers)
        self._history = TierHistory(store, model, backend.name, asked, has_pages=policy is not None)
        self._loop = KVLoop(self._history, model, backend, settings.kv_limit)
        self._sessions, self._is_asked_for = engine.sessions, settings.kv_measure
        if policy is not None:
            self._sessions.policy = self._history.policy

    def observation(self, request_session: str | None, response: GenerationResponse) -> KVObservation:
        """Return the state of a reply's KV cache at the end of the reply. request_session: the session id in
        the reply's request, or None if the request has no session."""
        return self._loop.observation(response, self._sessions.policy_of(request_session))

    def review(self, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Measure KV policies on the newest long replies, and choose a policy for new caches. Return a
        report. Every few tens of milliseconds the measurement checks the event `cancel`, and stops if the
        event is set.
        """
        report = self._loop.review(cancel)
        if self._sessions.policy is not None:
            self._sessions.policy = self._history.policy
        return report

    def is_due(self) -> bool:
        """Return True if there is a reply that `review` can measure."""
        return self._loop.is_due()

    def can_choose(self) -> bool:
        """Return True if `review` can lead to the first choice of a policy: the user chose none, there are
        too few measurements, and there is a reply to measure."""
        is_free = self._history.asked is None and self._sessions.policy is not None
        return is_free and not self._history.is_enough() and self.is_due()

    def due_when_idle(self) -> bool:
        """Return True if the program should call `review` in idle time: the setting `kv_measure` is on, there
        are too few measurements for a choice, and there is a reply to measure. When there are enough
        measurements, only the commands `learn kv --measure` and `learn consolidate` start more."""
        return self._is_asked_for and not self._history.is_enough() and self.is_due()

    def status(self) -> KVStatus:
        """Return the policy in use, its reason, and figures of the measurements."""
        return self._history.status()
