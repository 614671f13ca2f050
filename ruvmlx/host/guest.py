"""One of several users of an open host, as a chat app needs it: it ends its own replies and no others.

Everything else is shared. A rating, another adapter or another model is in force for all users of the host.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from ..engine.types import Chunk
from ..progress import QUIET, Watch
from ..runtime import Runtime
from .host import Host
from .serving import BeginReply

T = TypeVar("T")
LOOK_EVERY = 0.01  # seconds between two looks whether the replies have ended
Switch = Callable[[str, str, Watch], Awaitable[None]]  # as `Host.switch`


class Guest:
    """Has the methods of `Host` that the chat app calls. The host is open before the guest comes, and stays
    open when it leaves."""

    is_first_run = False

    def __init__(self, host: Host, switch: Switch | None = None) -> None:
        """switch: instead of `Host.switch`; it may refuse."""
        self._host, self._switch = host, switch or host.switch
        self._cancel = threading.Event()  # of the newest reply
        self._running: set[threading.Event] = set()  # of the replies that have begun
        self._switching = False

    async def open(self, watch: Watch) -> None:
        """The host is open."""

    @property
    def is_open(self) -> bool:
        return self._host.is_open

    async def call(self, work: Callable[[Runtime], T]) -> T:
        return await self._host.call(work)

    async def call_between(self, work: Callable[[Runtime], T]) -> T:
        return await self._host.call_between(work)

    async def run_idle(self, work: Callable[[Runtime, threading.Event], T]) -> T:
        return await self._host.run_idle(work)

    def cancel_idle(self) -> None:
        self._host.cancel_idle()

    async def settle(self, watch: Watch = QUIET) -> None:
        await self._host.settle(watch)

    async def switch(self, model: str, session: str, watch: Watch) -> None:
        self._switching = True
        try:
            await self._switch(model, session, watch)
        finally:
            self._switching = False

    def write(self, begin: BeginReply) -> AsyncIterator[list[Chunk]]:
        """As `Host.write`; `stop` and `close` end the reply."""
        cancel = self._cancel = threading.Event()

        def begin_tracked(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
            self._running.add(cancel)
            try:
                yield from begin(runtime, cancel)
            finally:
                self._running.discard(cancel)

        return self._host.write(begin_tracked, cancel)

    def stop(self) -> None:
        """End the guest's reply, keeping its text, and the opening of a model that it asked for."""
        self._cancel.set()
        if self._switching:
            self._host.stop_opening()

    async def close(self) -> None:
        """End the guest's replies and wait until their texts are stored."""
        self.stop()
        while self._running:
            await asyncio.sleep(LOOK_EVERY)

    def close_now(self) -> BaseException | None:
        """As `Host.close_now`, but waits for nothing."""
        self.stop()
        return None
