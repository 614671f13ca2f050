"""This module limits the memory that the bodies of all HTTP requests take together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from .errors import ApiError


@dataclass
class HeldBodies:
    """The memory of all bodies that the server holds.

    limit: the maximum of `held`, in bytes
    held: the number of bytes of all bodies whose requests are not answered yet
    is_stopped: True if the server stops, so that it reads no more bodies
    """

    limit: int
    held: int = 0
    is_stopped: bool = False
    _deadlines: set[asyncio.Timeout] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[None]:
        """The caller reads a body in the `async with` block. The block ends with TimeoutError after
        `seconds`, or when `stop` is called."""
        async with asyncio.timeout(seconds) as deadline:
            self._deadlines.add(deadline)
            try:
                yield
            finally:
                self._deadlines.discard(deadline)

    def stop(self) -> None:
        """End the reading of each body that arrives now. Only the thread of the event loop can call this
        method."""
        self.is_stopped = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)


class HeldBody:
    """The body of one request, as far as the server has read it. Call `release` when the request is
    answered."""

    def __init__(self, bodies: HeldBodies):
        self.bodies, self._data = bodies, bytearray()
        self._refused: ApiError | None = None

    def add(self, piece: bytes) -> None:
        """Keep one more piece of the request's body. If the limit leaves no room for the piece, drop the
        whole body."""
        bodies, count = self.bodies, len(piece)
        if self._refused is None and bodies.held + count > bodies.limit:
            self._refused = ApiError(
                503,
                f"the bodies of other requests take {bodies.held} of {bodies.limit} bytes; try again.",
                code="bodies_busy",
            )
            self.release()
        if self._refused is None:
            self._data += piece
            bodies.held += count

    def whole(self) -> bytes:
        """Return the whole body. Raise ApiError if the body was dropped because the limit left no room."""
        if self._refused is not None:
            raise self._refused
        return bytes(self._data)

    def release(self) -> None:
        self.bodies.held -= len(self._data)
        self._data = bytearray()
