"""This module reads and writes the rows that the deep loop (deep.py) keeps in the store for one adapter:
runs, EWC anchors, pruned ratings, and a stopped measurement."""

from collections.abc import Callable
from typing import Any

from ..store import AnchorRow, DeepRun, Store


class DeepHistory:
    """The part of AdapterHistory that keeps the deep loop's results. key: (fingerprint of the model, name of
    the adapter)."""

    def __init__(self, store: Store, key: tuple[str, str]):
        self._store, self._key = store, key

    def anchors(self) -> list[AnchorRow]:
        """Return the anchors that belong to the adapter version in use or to its ancestors, the oldest
        first."""
        return self._store.anchors.in_use(*self._key)

    def last_run(self) -> DeepRun | None:
        """Return the newest finished run of the deep loop; None if no run has finished."""
        return self._store.deep_runs.newest(*self._key)

    def end_run(
        self,
        version: int,
        base: int,
        importance: bytes | None,
        report: dict[str, Any],
        pruned: dict[str, str],
        limit: int,
        merge: Callable[[bytes, bytes], bytes],
    ) -> bool:
        """Store the report of a run of the deep loop, and the run's anchor unless `importance` is None, in
        one transaction. Return False, and write nothing, if the base LoRA in use is no longer `base`, or if
        the adapter was removed.

        base: the id of the base LoRA that the run measured
        importance: the importance of each weight of that base LoRA, encoded
        limit: the maximum number of anchors
        merge: a function that joins the encoded importances of two anchors (earlier, later) into one
            importance
        """
        versions = self._store.versions
        with self._store.transaction():
            in_use = versions.base_of(*self._key, versions.head(*self._key))
            if in_use != base or not versions.has_adapter(*self._key):
                return False
            if importance is not None:
                self._store.anchors.add(*self._key, version, base, importance, limit, merge)
            self._store.deep_runs.add(*self._key, version, report, pruned)
        return True

    def pruned_ratings(self) -> dict[str, str]:
        """Return {reply id: rating} of the rated replies that the deep loop has pruned from the reasoning
        bank."""
        return self._store.deep_runs.pruned_ratings(*self._key)

    def measurement(self) -> bytes | None:
        """Return the stopped measurement of the weights' importance, encoded; None if no measurement was
        stopped."""
        return self._store.checkpoints.measurement(*self._key)

    def put_measurement(self, state: bytes) -> None:
        """Store a stopped measurement, unless the adapter was removed."""
        with self._store.transaction():
            if self._store.versions.has_adapter(*self._key):
                self._store.checkpoints.put_measurement(*self._key, state)
