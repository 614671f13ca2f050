"""This module gives freed memory back to the operating system while the server runs.

The glibc allocator keeps freed memory that lies between blocks in use. docs/benchmarks.md has the server's
memory under load with this module and without this module.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from ruvmlx.platform import memory

RETURN_EVERY = 2.0  # seconds between two calls of `give_back`; each call takes about a millisecond
# Seconds of processor time. If the process used less time since the last call, there is no call, because the
# process freed little memory.
MIN_WORK = 0.1


@contextlib.asynccontextmanager
async def spare_memory_returned() -> AsyncIterator[None]:
    """In the `with` block, give freed memory back every RETURN_EVERY seconds. If the process did little work
    since the last call, do nothing."""
    task = asyncio.ensure_future(_return_often())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _return_often() -> None:
    done = time.process_time()
    while True:
        await asyncio.sleep(RETURN_EVERY)
        if time.process_time() - done > MIN_WORK:
            await asyncio.to_thread(memory.give_back)
            done = time.process_time()
