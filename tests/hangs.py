"""A time limit for asynchronous tests. The log of a test that hangs then names the line that waits. Without
the limit, `faulthandler_timeout` ends the whole process, and its output names only the event loop."""

import asyncio
import functools
import inspect

SECONDS = 1000.0  # the time limit of one asynchronous test; it is below `faulthandler_timeout`


def limit(item, seconds: float = SECONDS) -> None:
    """Let an asynchronous test raise TimeoutError after a number of seconds. Other tests stay unchanged."""
    test = getattr(item, "obj", None)
    if not inspect.iscoroutinefunction(test):
        return

    @functools.wraps(test)
    async def limited(**arguments):
        async with asyncio.timeout(seconds):
            await test(**arguments)

    item.obj = limited
