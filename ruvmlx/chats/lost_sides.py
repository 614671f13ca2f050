"""This module records in the witness log what the two sides of a backend did, and their failures."""

import contextlib

from ..backends.base import Backend, TwoSided
from ..engine.run import EngineParts
from ..errors import StoreError
from ..store import Store


def note_lost_sides(store: Store, engine: EngineParts) -> str:
    """Record each side of the backend that has failed since the last call. Return a line for the user, or ""
    if no side has failed."""
    backend = engine.backend
    failures = backend.take_failures() if isinstance(backend, TwoSided) else []
    for failure in failures:
        facts = {"model": engine.model.fingerprint, "side": failure.side, "why": failure.why}
        with contextlib.suppress(StoreError):
            store.witness.note("side_failure", facts)
    return " ".join(failure.line for failure in failures)


def note_sides(store: Store, backend: Backend, fingerprint: str) -> None:
    """End the work of the backend's other side, if it has one, and record what both sides did."""
    if isinstance(backend, TwoSided):
        facts = backend.finish()
        with contextlib.suppress(StoreError):
            store.witness.note("hybrid", {"model": fingerprint, **facts})
