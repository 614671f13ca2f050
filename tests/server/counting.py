"""What a running server holds: tasks, threads, files, and each page of its KV caches."""

import asyncio
import contextlib
import fcntl
import gc
import os
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ruvmlx.runtime import Runtime


def census(running: Any) -> Counter[str]:
    """What is open, by name: connections, tasks of the server's loop, threads of the process without those of
    asyncio's own pool, and the process's files."""

    async def tasks() -> list[str]:
        return [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]

    found = Counter(connection=len(running.server.server_state.connections))
    found.update(f"task {name}" for name in _in(running, tasks()))
    found.update(f"thread {t.name}" for t in threading.enumerate() if "asyncio_" not in t.name)
    found.update(f"file {name}" for name in _open_files())
    return found


def what_stays(running: Any, before: Counter[str], seconds: float = 20) -> Counter[str]:
    """What is open beyond an earlier census, as soon as that is nothing, or after this time. Other tests of
    the process may have left things that ended since; they do not count."""
    until = time.monotonic() + seconds
    while (more := census(running) - before) and time.monotonic() < until:
        time.sleep(0.01)
    return more


def _open_files() -> Iterator[str]:
    """Paths; of sockets and pipes the kind, without their numbers."""
    for fd in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the folder itself, and what macOS has no path for
            yield _open_file(int(fd))


def _open_file(fd: int) -> str:
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
        return "socket" if stat.S_ISSOCK(mode) else "pipe"
    if sys.platform == "darwin":  # /dev/fd/N is no link there
        return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    return os.readlink(f"/dev/fd/{fd}").partition(":[")[0]


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
    sessions.disk.wait()
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
