"""The pattern of an agent over HTTP: what must be read again, and how soon the first token comes."""

import statistics
from dataclasses import replace

import pytest
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from .agent import HttpAgent
from .conftest import run_server


@pytest.fixture
def start(starter, home, serve_all):
    """Starts a server with the starter, for longer contexts than its own: its speed is the same."""
    model = replace(starter, shape=replace(starter.config, max_context=12_288))

    def open_runtime():
        settings = Settings(kv="tiered", kv_disk=1024, adapter="none")
        return Runtime(Store(home / "ruvmlx.db"), model, NativeBackend(model), settings, learn=False)

    def begin():
        serve_all.append(run_server(open_runtime, Access(), ServerLimits()))
        return serve_all[-1]

    yield begin
    for running in serve_all:
        running.stop()
        assert "Traceback" not in running.log.getvalue()


def test_only_new_tokens_are_read(start, starter, full, capsys):
    """A small one: 700 tokens, 4 turns. With --full 8,000 tokens and 30 turns, and the bars of time."""
    system = 7800 if full else 600
    agent = HttpAgent(start, starter.tokenizer, system, 40 if full else 8)
    figures = agent.run(30 if full else 4)
    with capsys.disabled():
        print("\n" + "\n".join(figures.lines()))
    assert agent.shared >= system
    assert figures.prefilled <= 1.05 * figures.new
    assert max(figures.restart_ms) < min(figures.again_ms)
    if full:
        assert statistics.median(figures.first_ms) < 50
        assert 10 * max(figures.restart_ms) < min(figures.again_ms)
