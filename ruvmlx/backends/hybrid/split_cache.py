"""This module is the KV cache of a model whose layers are divided between two backends."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from ...kv.cache import Dump, KVStats
from ..base import KVCache


class SplitCache:
    """A cache of two caches: one for the first layers, one for the other layers. Both hold the same
    tokens."""

    def __init__(self, first: KVCache, last: KVCache):
        self.first, self.last = first, last

    @property
    def offset(self) -> int:
        return min(self.first.offset, self.last.offset)

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.last.nbytes

    def trim(self, n: int) -> bool:
        return 0 <= n <= self.offset and self.cut(self.offset - n)

    def cut(self, left: int) -> bool:
        """Remove the newest tokens from both parts, so that each part has at most `left` tokens. If one part
        removes more tokens, the other part removes the same tokens. Return False if a part cannot remove its
        newest tokens."""
        while max(self.first.offset, self.last.offset) > left:
            for part in (self.first, self.last):
                if part.offset > left and not part.trim(part.offset - left):
                    return False
                left = min(left, part.offset)
        return True

    def stats(self) -> KVStats:
        """Return the sum of the bytes of both parts. The number of tokens is that of one part, because both
        parts hold the same tokens."""
        one, two = self.first.stats(), self.last.stats()
        return replace(
            one,
            bytes=one.bytes + two.bytes,
            f16_bytes=one.f16_bytes + two.f16_bytes,
            tier_bytes=tuple(a + b for a, b in zip(one.tier_bytes, two.tier_bytes, strict=True)),
        )

    def fork(self) -> "SplitCache":
        return SplitCache(self.first.fork(), self.last.fork())

    def dump(self) -> Dump:
        one, two = self.first.dump(), self.last.dump()
        facts = {"first": one.facts, "last": two.facts}
        return Dump(facts, one.nbytes + two.nbytes, chain(one.parts, two.parts))

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        self.first.restore(facts["first"], read)
        self.last.restore(facts["last"], read)
