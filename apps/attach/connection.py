"""This module has the queue of an app's output. The app's thread puts items into the queue. The server's
event loop takes the items from the queue and sends them to the terminal."""

import asyncio
import contextlib
import json
import threading
from collections import deque

# the number of bytes of output that can wait for a slow terminal; above this number, `put` blocks
MAX_WAITING_BYTES = 1 << 20


class Outbox:
    """The queue of an app's output. The app's thread calls `put`, `tell` and `finish`. The event loop calls
    the other methods."""

    def __init__(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._items: deque[bytes | str] = deque()
        self._room, self._waiting = threading.Condition(), 0
        self._closed = self._finished = False

    def put(self, item: bytes | str) -> None:
        """Add bytes or a text to the queue. While the queue is full, the call blocks, as a write to a slow
        terminal does. After `close`, the call does nothing."""
        with self._room:
            self._room.wait_for(lambda: self._waiting < MAX_WAITING_BYTES or self._closed)
            if self._closed:
                return
            self._items.append(item)
            self._waiting += len(item)
        self._wake()

    def tell(self, **facts: object) -> None:
        self.put(json.dumps(facts))

    def finish(self) -> None:
        """Mark the end of the app's output."""
        self._finished = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # RuntimeError means that the server's event loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    async def take_all(self) -> list[bytes | str]:
        """Wait for items of the queue and return all of them in order, with adjacent bytes joined. At the end
        of the output, return an empty list."""
        while not (self._items or self._finished):
            await self._news.wait()
            self._news.clear()
        found: list[bytes | str] = []
        for _ in range(len(self._items)):
            item, last = self._items.popleft(), found[-1] if found else None
            if isinstance(item, bytes) and isinstance(last, bytes):
                found[-1] = last + item
            else:
                found.append(item)
        return found

    def release_room(self, item: bytes | str) -> None:
        """Release the bytes that `item` took in the queue, because the connection has sent the item."""
        with self._room:
            self._waiting -= len(item)
            self._room.notify_all()

    def close(self) -> None:
        """Drop all later items of the app's output, because the connection has ended."""
        with self._room:
            self._closed = True
            self._room.notify_all()
