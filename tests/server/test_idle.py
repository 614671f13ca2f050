"""What the server does between requests."""

import asyncio
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from ruvmlx.apps.server import idle
from ruvmlx.apps.server.idle import IdleWork
from ruvmlx.apps.server.requestlog import RequestLog
from ruvmlx.apps.server.serving import IDLE_WORK

from ruvmlx.platform.courtesy import Courtesy

from ..store.deleted_words import leave_words

# a store without deleted words
CLEAN = SimpleNamespace(search_index=SimpleNamespace(is_clean=lambda: True))


class Host:
    """Notes what it is asked for. fails: `run_idle` raises."""

    def __init__(self, fails: bool = False):
        self.did: list[str] = []
        self.fails, self.used_at, self.is_writing = fails, 0.0, False
        self.ended_early = 0  # times that a request ends the preparing

    async def settle(self):
        self.did.append("settle")
        return self.did.count("settle") > self.ended_early

    async def call_between(self, work, is_use=True):
        return None

    async def run_idle(self, work):
        self.did.append("learn")
        if self.fails:
            raise ValueError("broken\nin two lines")
        return {"promoted": True}, False

    def cancel_idle(self):
        self.did.append("cancel")


class Server:
    def __init__(self, host, sink=None):
        self.host, self.log = host, RequestLog(sink=sink)
        self.unloaded = False
        self.stopping, self.is_busy, self.written, self.idle_work = False, False, 0, ""


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(idle, "LOOK_EVERY", 0.001)


async def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.001)
    assert condition()


async def test_replies_are_prepared_once_for_their_ratings():
    server = Server(Host())
    async with IdleWork(server, idle_after=1e9).running():
        server.written = 2
        await until(lambda: server.host.did == ["settle"])
        await asyncio.sleep(0.02)
        server.written = 3
        await until(lambda: server.host.did == ["settle"] * 2)


async def test_what_a_request_ended_goes_on_later():
    server = Server(Host())
    server.host.ended_early, server.written = 2, 1
    async with IdleWork(server, idle_after=1e9).running():
        await until(lambda: server.host.did == ["settle"] * 3)
        await asyncio.sleep(0.02)
        assert server.host.did == ["settle"] * 3


async def test_nothing_is_done_while_requests_run():
    server = Server(Host())
    server.is_busy, server.written = True, 1
    async with IdleWork(server, idle_after=0.0).running():
        await asyncio.sleep(0.05)
        assert server.host.did == []
        server.is_busy = False
        await until(lambda: server.host.did[:2] == ["settle", "learn"])
    assert server.host.did[-1] == "cancel"


@pytest.mark.parametrize("learns", [True, False])
def test_it_learns_only_if_it_may_but_always_cleans_the_index(open_tiny, monkeypatch, learns):
    with open_tiny() as runtime:
        leave_words(runtime.store)
        monkeypatch.setattr(runtime.learning, "is_due", lambda: True)
        monkeypatch.setattr(runtime.learning, "consolidate", lambda *_: {"promoted": True})
        monkeypatch.setattr(Courtesy, "reason_to_wait", lambda self: "")
        facts, _ = idle.learn(runtime, threading.Event(), lambda work: None, Courtesy(), learns)
        assert facts == ({"promoted": True} if learns else {})
        assert runtime.store.search_index.is_clean()


async def test_with_learning_off_idle_work_runs_without_it():
    given = []
    host = Host()

    async def run_idle(work):
        given.append(work(SimpleNamespace(store=CLEAN), threading.Event()))
        return given[-1]

    host.run_idle = run_idle
    async with IdleWork(Server(host), learns=False, idle_after=0.0).running():
        await until(lambda: given)
    assert given[0] == ({}, False)


async def test_a_failure_is_one_line_of_the_log_and_is_tried_less_often(capsys):
    server = Server(Host(fails=True), sink=sys.stderr)
    work = IdleWork(server, idle_after=0.01)
    async with work.running():
        await until(lambda: server.host.did.count("learn") == 3)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(" idle failed=" in line and "Traceback" not in line for line in lines)
    assert work._stuck >= 2


@pytest.mark.parametrize("name", ["training", "measuring"])
async def test_status_names_the_work_while_it_goes_on(name):
    seen = []

    class Working(Host):
        async def run_idle(self, work):
            def note_work(*args, **kwargs):
                seen.append(server.idle_work)
                return {"promoted": False, "measured": 1}

            learning = SimpleNamespace(is_due=lambda: name == "training", consolidate=note_work)
            tiers = SimpleNamespace(due_when_idle=lambda: name == "measuring", review=note_work)
            done = work(SimpleNamespace(store=CLEAN, learning=learning, tiers=tiers), threading.Event())
            self.did.append("learn")
            return done

    server = Server(Working())
    async with IdleWork(server, idle_after=0.0).running():
        await until(lambda: seen)
        await until(lambda: server.idle_work == "")
    assert set(seen) == {name}


def test_status_and_metrics_name_idle_work(running):
    for name in ("", *IDLE_WORK):
        running.serving.idle_work = name
        assert running.ask("GET", "/v1/status").json["idle_work"] == (name or None)
        metrics = running.ask("GET", "/metrics").body.decode()
        for work in IDLE_WORK:
            assert f'ruvmlx_idle_work{{work="{work}"}} {int(work == name)}\n' in metrics
    running.serving.idle_work = ""


def test_status_does_not_wait_for_this_work(running, monkeypatch):
    """Status and metrics name it while it goes on, and do not end it; all else does."""
    begun, ended = threading.Event(), threading.Event()

    def settle(cancel, watch, unseen):
        if not begun.is_set():
            begun.set()
            cancel.wait(20)
            ended.set()

    monkeypatch.setattr(running.serving.host.holder.opened_runtime.learning, "settle", settle)
    running.chat()
    assert begun.wait(20)
    assert running.ask("GET", "/v1/status").json["idle_work"] == "preparing"
    assert 'ruvmlx_idle_work{work="preparing"} 1' in running.ask("GET", "/metrics").body.decode()
    assert running.ask("GET", "/v1/ps").json["models"][0]["model_bytes"] > 0
    assert running.ask("GET", "/api/ps").json["models"][0]["size"] > 0
    assert not ended.is_set()
    body = {"model": running.model, "input": "hello"}
    assert running.ask("POST", "/v1/embeddings", body).status == 200 and ended.is_set()
    running.wait_until(lambda: not running.serving.idle_work)


def test_a_rating_finds_its_reply_prepared(running):
    """The server prepares it while nobody asks."""
    running.chat()
    traces = running.serving.host.holder.opened_runtime.learner.traces
    running.wait_until(lambda: all(trace.stats is not None for trace in traces.held.values()))
    assert traces.held


async def test_the_server_learns_only_while_no_key_is_pressed():
    server = Server(Host())
    async with IdleWork(server, idle_after=0.2).running():
        for _ in range(50):
            server.host.used_at = time.monotonic()
            await asyncio.sleep(0.01)
        assert "learn" not in server.host.did
        await asyncio.sleep(0.5)
        assert "learn" in server.host.did
