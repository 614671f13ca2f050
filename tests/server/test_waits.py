"""The report on who waits for whom, with a small model."""

import os
import sys
import time

import pytest

from . import waits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the clock of another process is Linux's")


async def test_it_says_what_is_over_its_limit(tiny_folder, monkeypatch, capsys):
    """Prompts have their shares, a server rests; with other limits, neither is good enough."""
    monkeypatch.setattr(waits, "LENGTHS", (2, 6))
    monkeypatch.setattr(waits, "AFTER", 1.0)
    monkeypatch.setattr(waits, "LOOK", 0.5)
    monkeypatch.setattr(waits, "MOST_SHARE", 100.0)  # replies of a small model are next to no work
    monkeypatch.setattr(waits, "MOST_IDLE", 0.5)
    monkeypatch.setattr(waits, "MOST_LATER", 100.0)
    with waits.start_server(str(tiny_folder)) as server:
        found = await server.times(2)
        assert 0 < found.sent < found.first <= found.ended
        assert await waits.fair_shares(server, 3) and await waits.rest(server)
        assert await waits.short_beside_streams(server, 3)
        monkeypatch.setattr(waits, "MOST_SHARE", 0.0)
        monkeypatch.setattr(waits, "MOST_IDLE", 0.0)
        monkeypatch.setattr(waits, "MOST_ALONE", 0.0)
        monkeypatch.setattr(waits, "MOST_LATER", 0.0)
        assert not await waits.fair_shares(server, 2) and not await waits.rest(server)
        assert not await waits.short_beside_streams(server, 2)
    said = capsys.readouterr().out
    assert said.count("times its fair share") == 2 and said.count("of a core") == 2


def test_the_clock_is_a_process_time():
    clock = waits.clock_of(os.getpid())
    before = time.clock_gettime(clock)
    while time.clock_gettime(clock) < before + 0.01:
        pass
    assert abs(time.clock_gettime(clock) - time.process_time()) < 0.05


def test_gaps_before_and_beside_a_long_prompt():
    """Those that are partly in one time and partly in the other count in neither."""
    long = waits.Times(10.0, (20.0,), 21.0)
    stream = waits.Times(0.0, (1.0, 3.0, 3.0, 9.0, 11.0, 15.0, 19.0, 22.0), 30.0)
    assert waits.gaps_of([stream, waits.Times(0.0, (), 1.0)], long) == ([2.0, 6.0], [4.0, 4.0])
