"""Several chats on one open host: what one of them ends is its own."""

import asyncio

import pytest

from ruvmlx.engine.types import Chunk
from ruvmlx.host.guest import Guest
from ruvmlx.host.host import Host
from ruvmlx.progress import QUIET
from tests.chat.scripted import ScriptedRuntime

# -- the host and its guests --------------------------------------------------------------------------


@pytest.fixture
async def host():
    host = Host(ScriptedRuntime)
    await host.open(QUIET)
    yield host
    await host.close()


async def test_a_guest_ends_its_own_reply_alone(host):
    """Stopping and closing leave the other guest's reply, and the host, as they are."""
    runtime = host.holder.opened_runtime
    guests, written = [Guest(host), Guest(host)], [0, 0]

    def endless(number):
        def begin(runtime, cancel):
            while not cancel.is_set():
                written[number] += 1
                yield Chunk("x", written[number])

        return begin

    async def read(number):
        return [chunk async for chunks in guests[number].write(endless(number)) for chunk in chunks]

    async def grown(number, by=100):
        enough = written[number] + by
        while written[number] < enough:
            await asyncio.sleep(0.001)

    reading = [asyncio.ensure_future(read(number)) for number in (0, 1)]
    await asyncio.gather(grown(0), grown(1))
    await guests[0].close()
    assert len(await reading[0]) == written[0]
    await grown(1)
    guests[1].stop()
    assert len(await reading[1]) == written[1] and host.is_open and not runtime.closed
