"""What a running server holds: tasks, threads, files, and each page of its KV caches."""

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any

from ruvmlx.runtime import Runtime


@dataclass(frozen=True)
class Census:
    """tasks: of the server's loop; threads: by name, without those of asyncio's own pool; files: descriptors
    of the process; connections: open ones."""

    tasks: int
    threads: tuple[str, ...]
    files: int
    connections: int


def census(running: Any) -> Census:
    async def tasks() -> int:
        return len(asyncio.all_tasks()) - 1  # not this one

    names = sorted(thread.name for thread in threading.enumerate())
    files = sum(1 for fd in os.listdir("/proc/self/fd") if _is_open(fd))
    connections = len(running.server.server_state.connections)
    return Census(_in(running, tasks()), tuple(n for n in names if "asyncio_" not in n), files, connections)


def _is_open(fd: str) -> bool:
    """Not that of the folder which lists them."""
    return os.path.exists(f"/proc/self/fd/{fd}")


def _in(running: Any, work: Awaitable[Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, running.loop).result(30)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pages:
    """counted: pages by tier, as the pool counts them; explained: those of kept sequences; misused: pages
    whose users are not the sequences that have them; caches: alive beyond the kept ones; made: pages that the
    storage made and has not freed."""

    counted: tuple[int, ...]
    explained: tuple[int, ...]
    misused: int
    caches: int
    made: int

    @property
    def is_sound(self) -> bool:
        return self == replace(self, explained=self.counted, misused=0, caches=0, made=sum(self.counted))


def pages(running: Any) -> Pages:
    """Call it while no reply is written."""
    return _in(running, running.serving.host.call(_pages))


def _pages(runtime: Runtime) -> Pages:
    sessions, pool = runtime.engine.sessions, runtime.backend.pool
    sessions._disk.wait()
    gc.collect()
    kept = list({id(s.cache): s.cache for s in sessions._sessions.values()}.values())
    for cache in kept:
        cache._stop()  # pages that are demoted ahead of time
    users = Counter(id(page) for cache in kept for page in cache.pages if page is not None)
    held = {id(page): page for cache in kept for page in cache.pages if page is not None}
    tiers = Counter(page.tier for page in held.values())
    explained = tuple(tiers[tier] for tier in range(len(pool.pages)))
    misused = sum(page.users != users[name] for name, page in held.items())
    others = len(pool.caches) - len(kept) + len(sessions._running)
    return Pages(tuple(pool.pages), explained, misused, others, pool.storage.made)


def count_pages(storage: Any) -> None:
    """Let a native storage count in `made` the pages that exist, in whichever thread they are made."""
    storage.made, lock = 0, threading.Lock()
    make, free = storage.make, storage.free

    def counted_make(tier: int) -> int:
        with lock:
            storage.made += 1
        return make(tier)

    def counted_free(page: int, tier: int) -> None:
        with lock:
            storage.made -= 1
        free(page, tier)

    storage.make, storage.free = counted_make, counted_free
