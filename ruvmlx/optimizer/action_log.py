"""This module writes the optimizer's actions to the witness log, and counts those of this process."""

from collections import Counter
from dataclasses import replace
from time import time

from ..store import OptimizerAction, Store, Tuning


class ActionLog:
    """The actions of the optimizer of one model on one backend.

    newest: the newest action of this process; None: there was none
    counts: {(knob, outcome): the number of actions of this process}
    tunings: {knob: its newest trial}
    """

    def __init__(self, store: Store, fingerprint: str, backend: str):
        self._store, self._mine = store, (fingerprint, backend)
        self.newest: OptimizerAction | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.tunings: dict[str, Tuning] = store.tunings.all(*self._mine)

    def note(self, action: OptimizerAction) -> int:
        """Commit an action that changes no stored value. Return the number of its row of the log."""
        row = self._store.tunings.note(*self._mine, action)
        self._count(action)
        return row

    def put(self, tuning: Tuning, action: OptimizerAction) -> None:
        """Commit a trial and its action."""
        self._store.tunings.put(*self._mine, tuning, action)
        self.tunings[tuning.knob] = replace(tuning, created=time())
        self._count(action)

    def newest_row(self, knob: str, outcome: str) -> int | None:
        """Return the number of the log's newest row about a knob with this outcome; None: there is none."""
        return self._store.tunings.newest_row(*self._mine, knob, outcome)

    def _count(self, action: OptimizerAction) -> None:
        self.newest = action
        self.counts[action.knob, action.outcome] += 1
