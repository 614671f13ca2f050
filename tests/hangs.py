"""A time limit for asynchronous tests. The error of a test that hangs then names the line that waits.
Without the limit, `faulthandler_timeout` ends the whole process, and the output names only the event loop."""

import asyncio
import functools
import inspect

SECONDS = 1000.0  # the time limit of one asynchronous test; it is below `faulthandler_timeout`


def limit(item, seconds: float = SECONDS) -> None:
    """Make an asynchronous test raise TimeoutError after `seconds` seconds. Leave other tests unchanged."""
    test = getattr(item, "obj", None)
    if not inspect.iscoroutinefunction(test):
        return

    @functools.wraps(test)
    async def run_with_limit(**arguments):
        async with asyncio.timeout(seconds):
            await test(**arguments)

    item.obj = run_with_limit
