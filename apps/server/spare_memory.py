"""This module returns the memory that requests have freed to the operating system while the server answers.

The allocator of glibc keeps freed memory between blocks in use. Without this module, a server keeps about
twice the memory that it needs (docs/benchmarks.md, an hour of load).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from ruvmlx.platform import memory

RETURN_EVERY = 10.0  # seconds; a call takes some milliseconds, in a thread of its own
WORK = 0.5  # seconds of processor time; after less work, the freed memory is not worth a call


@contextlib.asynccontextmanager
async def spare_memory_returned() -> AsyncIterator[None]:
    """In the `with` block, return freed memory every RETURN_EVERY seconds, unless this process did little
    work since the last time."""
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
        if time.process_time() - done > WORK:
            await asyncio.to_thread(memory.give_back)
            done = time.process_time()
