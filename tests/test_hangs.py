"""An asynchronous test that hangs fails, and the error names the line that waits."""

import asyncio
import inspect
import traceback
from types import SimpleNamespace

import pytest

from . import hangs


async def test_a_hang_names_its_line():
    async def wait_without_end(event):
        await event.wait()

    item = SimpleNamespace(obj=wait_without_end)
    hangs.limit(item, 0.01)
    with pytest.raises(TimeoutError) as found:
        await item.obj(event=asyncio.Event())
    assert "await event.wait()" in "".join(traceback.format_exception(found.value))


async def test_every_asynchronous_test_has_the_limit(request):
    tests = [item.obj for item in request.session.items if hasattr(item, "obj")]
    asynchronous = [test for test in tests if inspect.iscoroutinefunction(test)]
    assert asynchronous and all(test.__code__.co_filename == hangs.__file__ for test in asynchronous)


def test_another_test_stays_unchanged():
    item = SimpleNamespace(obj=len)
    hangs.limit(item)
    assert item.obj is len
