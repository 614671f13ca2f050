"""What an app sends to its terminal: from the app's thread to the server's event loop."""

import asyncio
import contextlib
import json
import threading
from collections import deque

MAX_WAITING_BYTES = 1 << 20  # bytes that may wait for a slow terminal


class Outbox:
    """`put` and `tell` are for the app's thread, all else for the event loop."""

    def __init__(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._items: deque[bytes | str] = deque()
        self._room, self._waiting = threading.Condition(), 0
        self._closed = self._finished = False

    def put(self, item: bytes | str) -> None:
        """Bytes or a text. Waits while too much waits already, like a write to a terminal; after `close` it
        does nothing."""
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
        """Nothing follows."""
        self._finished = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the server's loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    async def taken(self) -> list[bytes | str]:
        """Wait for items and take all of them, in order. Neighbouring bytes are joined. The list is empty
        when the connection is finished."""
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
        """The connection has taken it."""
        with self._room:
            self._waiting -= len(item)
            self._room.notify_all()

    def close(self) -> None:
        """Nobody reads any more."""
        with self._room:
            self._closed = True
            self._room.notify_all()
