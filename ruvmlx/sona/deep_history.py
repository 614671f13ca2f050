"""What the deep loop has stored of one adapter: its runs, anchors, pruned ratings, a stopped measurement."""

from collections.abc import Callable
from typing import Any

from ..store import AnchorRow, DeepRun, Store


class DeepHistory:
    """A part of AdapterHistory. key: (fingerprint of the model, name of the adapter)."""

    def __init__(self, store: Store, key: tuple[str, str]):
        self._store, self._key = store, key

    def anchors(self) -> list[AnchorRow]:
        """Ends of tasks on the way to the version in use, the oldest first."""
        return self._store.anchors.in_use(*self._key)

    def last_run(self) -> DeepRun | None:
        """The newest run that came to an end."""
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
        """Write a run, and the anchor unless `importance` is None, in one transaction.

        limit: anchors at most; merge(earlier, later): one importance of two anchors. False, and nothing is
        written, if another base is in use than `base`, which was measured.
        """
        with self._store.transaction():
            if self._store.versions.base_of(*self._key, self._store.versions.head(*self._key)) != base:
                return False
            if importance is not None:
                self._store.anchors.add(*self._key, version, base, importance, limit, merge)
            self._store.deep_runs.add(*self._key, version, report, pruned)
        return True

    def pruned(self) -> dict[str, str]:
        """Rating by reply id, of the entries that the reasoning bank does not find any more."""
        return self._store.deep_runs.pruned(*self._key)

    def measurement(self) -> bytes | None:
        """A measurement that was stopped."""
        return self._store.checkpoints.measurement(*self._key)

    def put_measurement(self, state: bytes) -> None:
        self._store.checkpoints.put_measurement(*self._key, state)
