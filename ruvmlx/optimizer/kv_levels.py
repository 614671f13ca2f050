"""This module records in the witness log when a lack of memory lowers the precision of the KV cache
(kv/pool.py), and when this ends."""

import contextlib
from collections.abc import Callable

from ..errors import StoreBusy
from ..kv.policy import F16, TierPolicy, tighten
from ..kv.pool import LevelChange, PagePool
from ..store import OptimizerAction
from ..tiers import EVERYTHING
from .action_log import ActionLog

KV_LEVEL = "kv_level"  # the knob of the log's rows about the pool's level of tightening


class LevelRecorder:
    """The recorder writes a row for each change of a pool's level that changes the bits of new caches. The
    rows are written after a reply, so that no token waits for the disk."""

    def __init__(self, log: ActionLog, pool: PagePool | None, policy: Callable[[], TierPolicy | None]):
        """policy: a function that returns the tier policy of new caches"""
        self._log, self._pool, self._policy = log, pool, policy
        self._first_row: int | None = None  # the log's row about the first rise of the level; None: level 0

    def record(self) -> None:
        """Write the changes since the last call. Raises StoreBusy; the next call then writes the rest."""
        while self._pool is not None and self._pool.level_changes:
            self._record_one(self._pool.level_changes[0])
            self._pool.level_changes.popleft()

    def _record_one(self, change: LevelChange) -> None:
        before, after = self._lengths(change.before), self._lengths(change.after)
        is_over = after == self._lengths(0)
        is_open = self._first_row is not None  # a policy chosen since can have the same lengths at all levels
        if before == after and not (is_over and is_open):
            return
        outcome = "undone" if is_over else "forced" if change.after > change.before else "eased"
        row = self._log.note(
            OptimizerAction(
                KV_LEVEL, change.why, before, after, outcome,
                undoes=self._first_row if is_over else None,
                facts={"pressure": round(change.pressure, 4), "kv_bytes": change.nbytes},
            )
        )  # fmt: skip
        self._first_row = None if is_over else self._first_row or row

    def close(self) -> None:
        """Write the remaining changes. The caches of this process end with it, so a raised level also
        ends."""
        with contextlib.suppress(StoreBusy):
            self.record()
            if self._first_row is not None and self._pool is not None:
                pressure = self._pool.pressure()
                self._record_one(LevelChange(self._pool.level, 0, pressure, 0, "the runtime was closed"))

    def _lengths(self, level: int) -> str:
        """Return the lengths of a level of tightening, as the setting `kv_tiers` writes them: "256,1024"."""
        lengths = tighten(self._policy() or F16, level).lengths
        return ",".join("all" if age >= EVERYTHING else str(age) for age in lengths)
