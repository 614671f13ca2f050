"""This module lets several chat apps use one open host. Each chat app can end only its own replies.

The chat apps share the model, the adapter and the store. A rating, a switch of the adapter or a switch of the
model affects all chat apps.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from ..engine.types import Chunk
from ..progress import Watch
from ..runtime import Runtime
from .host import Host
from .serving import BeginReply

LOOK_EVERY = 0.01  # seconds between two checks whether the guest's replies have ended
Switch = Callable[[str, str, Watch], Awaitable[None]]  # a method with the parameters of `Host.switch`


class Guest:
    """A guest is one chat app that uses an open host, together with other chat apps. The class has the
    methods of `Host` that the chat app calls. The host is open before the guest starts, and stays open when
    the guest closes."""

    is_first_run = False

    def __init__(self, host: Host, switch: Switch | None = None) -> None:
        """switch: a method to call instead of `Host.switch`; it can raise an error to refuse the switch."""
        self._host, self._switch = host, switch or host.switch
        self._cancel = threading.Event()  # the event that ends the newest reply
        self._running: set[threading.Event] = set()  # the events that end the replies that have begun
        self._switching = False
        self.call, self.call_between, self.call_in_slices = host.call, host.call_between, host.call_in_slices
        self.run_idle, self.cancel_idle, self.settle = host.run_idle, host.cancel_idle, host.settle
        self.interrupt = host.interrupt

    async def open(self, watch: Watch) -> None:
        """Do nothing, because the host is already open."""

    @property
    def is_open(self) -> bool:
        return self._host.is_open

    async def switch(self, model: str, session: str, watch: Watch) -> None:
        self._switching = True
        try:
            await self._switch(model, session, watch)
        finally:
            self._switching = False

    def write(self, begin: BeginReply) -> AsyncIterator[list[Chunk]]:
        """Stream a reply as `Host.write` does; `stop` and `close` of this guest end the reply."""
        cancel = self._cancel = threading.Event()

        def begin_tracked(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
            self._running.add(cancel)
            try:
                yield from begin(runtime, cancel)
            finally:
                self._running.discard(cancel)

        return self._host.write(begin_tracked, cancel)

    def stop(self) -> None:
        """End the guest's newest reply and keep its text. Also end the loading of a model that the guest has
        requested."""
        self._cancel.set()
        if self._switching:
            self._host.stop_opening()

    async def close(self) -> None:
        """End the newest reply and wait until the texts of all the guest's replies are stored."""
        self.stop()
        while self._running:
            await asyncio.sleep(LOOK_EVERY)

    def close_now(self) -> BaseException | None:
        """End the guest's newest reply. Unlike `Host.close_now`, do not wait for the end of the reply, and do
        not close the host."""
        self.stop()
        return None
