"""The server returns freed memory while it works (apps/server/spare_memory.py)."""

import asyncio
import time

import pytest
from ruvmlx.apps.server import spare_memory


@pytest.mark.parametrize(("work", "is_returned"), [(0.0, True), (1e9, False)])
async def test_freed_memory_is_returned_while_the_server_works(monkeypatch, work, is_returned):
    calls = []
    monkeypatch.setattr(spare_memory.memory, "give_back", lambda: calls.append(1))
    monkeypatch.setattr(spare_memory, "RETURN_EVERY", 0.01)
    monkeypatch.setattr(spare_memory, "MIN_WORK", work)
    async with spare_memory.spare_memory_returned():
        end = time.monotonic() + (10 if is_returned else 0.2)
        while time.monotonic() < end and len(calls) < 3:
            await asyncio.sleep(0.01)
        assert (len(calls) >= 3) == is_returned
    count = len(calls)
    await asyncio.sleep(0.05)
    assert len(calls) == count
