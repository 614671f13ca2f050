"""This module is the KV cache of rank 0 for a model over several ranks."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...kv.cache import Dump, KVStats, PagedCache
from ...kv.storage import Bytes
from ..mlx.plain_cache import MLXCache
from .peers import PeerLinks

_ids = itertools.count(1)


class SharedCache:
    """A cache of which each rank has the keys and values of its own heads. `local` is rank 0's part. All
    ranks do the same to their parts, in the same order."""

    def __init__(self, local: MLXCache | PagedCache, peers: PeerLinks, model: int):
        self.local, self._peers, self._model, self.id = local, peers, model, next(_ids)

    def tell(self, do: str, **facts: Any) -> None:
        """Tell the other ranks what to do with this cache."""
        self._peers.tell(self._message(do, **facts))

    def _message(self, do: str, **facts: Any) -> dict[str, Any]:
        level = self.local.pool.level if isinstance(self.local, PagedCache) else 0
        return {"do": do, "model": self._model, "id": self.id, "level": level} | facts

    def __del__(self) -> None:
        self._peers.dropped.append(("cache", self.id))

    @property
    def offset(self) -> int:
        return self.local.offset

    @property
    def nbytes(self) -> int:
        return self.local.nbytes

    @property
    def room(self) -> int:
        return self.local.room

    def stats(self) -> KVStats:
        return self.local.stats()

    def trim(self, n: int) -> bool:
        done = self.local.trim(n)
        if done:
            self.tell("trim", n=n, left=self.local.offset)
        return done

    def retract(self, n: int) -> None:
        self.local.retract(n)
        self.tell("retract", n=n)

    def hold(self, n: int) -> None:
        if isinstance(self.local, PagedCache):
            self.tell("hold", n=n)
            self.local.hold(n)

    def fork(self) -> "SharedCache":
        other = SharedCache(self.local.fork(), self._peers, self._model)
        self.tell("fork", new=other.id)
        return other

    def dump(self) -> Dump:
        """Return the content of the parts of all ranks. The ranks send the sizes of their parts at once, and
        their bytes when these are read."""
        own = self.local.dump()
        others = [facts for facts, _ in self._peers.ask(self._message("dump"))]
        facts = {"ranks": [own.facts, *(other["facts"] for other in others)]}
        sizes = [other["nbytes"] for other in others]
        return Dump(facts | {"sizes": sizes}, own.nbytes + sum(sizes), self._parts(own.parts))

    def _parts(self, own: Iterator[Bytes]) -> Iterator[Bytes]:
        yield from own
        for link in self._peers.links:
            link.send(self._message("bytes"))
            yield np.frombuffer(link.receive()[1], np.uint8)

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        parts: Sequence[Any] = facts["ranks"]
        if len(parts) != len(self._peers.links) + 1:
            raise ValueError(f"the cache is of {len(parts)} ranks")
        self.local.restore(parts[0], read)
        for link, part, size in zip(self._peers.links, parts[1:], facts["sizes"], strict=True):
            link.send(self._message("restore", facts=part), bytes(read(size)))
            if why := link.receive()[0].get("why"):
                raise ValueError(why)
