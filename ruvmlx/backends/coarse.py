"""This module appends tokens to replies that no user sees. Some backends can do this in less time and less
exactly."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .base import Adapters, Backend, KVCache, Step


@runtime_checkable
class CoarseDecoding(Protocol):
    """A backend that can append tokens in less time and less exactly."""

    def decode_coarse(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        """Append one token to each of B >= 1 different caches, as Backend.decode_batch describes. The results
        are less exact than the results of `decode_batch`."""


def decode_coarse(
    backend: Backend, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
) -> list[Step]:
    """Append one token to each cache in the fastest way that the backend has. The steps may be less exact."""
    decode = backend.decode_coarse if isinstance(backend, CoarseDecoding) else backend.decode_batch
    return decode(tokens, caches, adapter)
