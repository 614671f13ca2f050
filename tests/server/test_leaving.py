"""Clients that leave at any moment, and rude ones, beside good ones: nothing of them stays."""

import asyncio
import gc
import random
import time
from collections import Counter

import pytest
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine.run import Run
from ruvmlx.engine.scheduler import Scheduler
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from .clients import APIS, CHAT, MOMENTS, RUDE, ask, leave_early, question, read_slowly, rude
from .conftest import run_server
from .counting import census, count_pages, pages, what_stays

KEY = "a-key-of-sixteen-characters"
WORDS = "The quick brown fox reads a long prompt about rivers, stones and the sea. " * 4
STALL = 5.0  # seconds between two pieces of a stream: a test machine may be busy


@pytest.fixture
def start(tiny, tiny_neutral, tiny_whitening, home, serve_all):
    """start(limits=..., access=...): a server with the tiny model on the native backend, whose caches have
    pages. They are counted."""

    def begin(limits=None, access=None, **settings):
        def open_runtime():
            store = Store(home / "ruvmlx.db")
            store.model_data.put_reference_text(tiny.fingerprint, tiny_neutral)
            store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
            backend = NativeBackend(tiny, threads=1)
            count_pages(backend.pool.storage)
            return Runtime(store, tiny, backend, Settings(**{"kv": "tiered", "kv_disk": 8, **settings}))

        running = run_server(open_runtime, access or Access(), limits or ServerLimits())
        serve_all.append(running)
        return running

    yield begin
    for running in serve_all:
        running.stop()
        assert "Traceback" not in running.log.getvalue() and '"error"' not in running.log.getvalue()


@pytest.fixture
def last_work(monkeypatch):
    """No reply ends by itself, and a step takes at least 2 ms. Returns when work was done last for a request,
    by the beginning of its question."""
    seen, draw, read, step = {}, Run.draw, Run.read_piece, Scheduler.step

    def note(run):
        if run.request.cancel.is_set():
            return
        said = run.request.messages[-1].content if run.request.messages else ""
        seen[said.partition(":")[0]] = time.monotonic()

    def noting_draw(run, record=True):
        run.request.ignore_eos = True
        note(run)
        return draw(run, record)

    def noting_read(run, most=None):
        note(run)
        return read(run, most)

    def slower(scheduler):
        time.sleep(0.002)
        return step(scheduler)

    monkeypatch.setattr(Run, "draw", noting_draw)
    monkeypatch.setattr(Run, "read_piece", noting_read)
    monkeypatch.setattr(Scheduler, "step", slower)
    return seen


class Crowd:
    """Good clients that stream one reply after another, beside others. gaps: of their streams."""

    def __init__(self, running, key=None):
        self.running, self.over = running, False
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.gaps, self.good = [0.0], 0

    async def stream(self, i: int) -> None:
        rng = random.Random(i)
        while not self.over:
            path = rng.choice(APIS)
            text = f"good {i}: {WORDS[: rng.randrange(100, 250)]}"
            body = question(path, self.running.model, text, 100, stream=True)
            got = await ask(self.running.port, path, body, **self.headers)
            assert got.status == 200, got.body
            self.gaps += got.gaps
            self.good += 1

    async def stream_beside(self, work, good=4):
        """Await the work while good clients stream."""
        streams = [asyncio.ensure_future(self.stream(i)) for i in range(good)]
        try:
            return await work
        finally:
            self.over = True
            await asyncio.gather(*streams)


def test_clients_that_leave(start, last_work, full, capsys):
    """Their replies end within a second, at whatever point they leave, and nothing stays but what kept
    prefixes explain, to the page. Streams beside them go on."""
    running, count = start(), 1000 if full else 60
    crowd, gone = Crowd(running), {}

    async def leaving(i: int, places: asyncio.Semaphore) -> None:
        rng = random.Random(i)
        path, moment = APIS[i % 3], MOMENTS[i % 5]
        text = f"leaver {i}: {WORDS[rng.randrange(40) : rng.randrange(60, 250)]}"
        more = {"n": 1 + i % 2} if path == CHAT else {}
        body = question(path, running.model, text, 200, stream=i % 4 > 0, **more)
        async with places:
            gone[f"leaver {i}"] = await leave_early(running.port, path, body, moment, rng)

    async def all_leave() -> None:
        places = asyncio.Semaphore(24)
        await asyncio.gather(*(leaving(i, places) for i in range(count)))

    async def once() -> None:
        for path in APIS:
            await ask(running.port, path, question(path, running.model, "once: hello", 400, stream=True))

    asyncio.run(once())
    running.wait_until(lambda: not running.server.server_state.connections)
    gc.collect()  # what other tests left
    before = census(running)
    asyncio.run(crowd.stream_beside(all_leave()))
    quiet = running.wait_until(lambda: running.serving.waiting == 0 and running.serving.calls == 0)
    late = {name: last_work[name] - when for name, when in gone.items() if name in last_work}
    with capsys.disabled():
        print(
            f"\n{count} clients left, {len(late)} of them behind the header and the body: work went on for "
            f"{max(late.values()):.3f} s at most; {crowd.good} replies beside them, {max(crowd.gaps):.3f} s "
            "between two pieces at most"
        )
    assert len(late) > count / 5 and max(late.values()) < 1 and quiet < 1
    assert max(crowd.gaps) < STALL
    assert not what_stays(running, before)
    found = pages(running)
    assert found.is_sound and sum(found.counted), found
    runtime = running.serving.runtime
    assert len(runtime.writer.scheduler) == 0 and not running.serving._requests
    running.ask("GET", "/metrics")  # after it the thread has let go of the last request
    runtime.engine.sessions.clear()
    empty = pages(running)
    assert empty.is_sound and not sum(empty.counted), empty


def test_rude_clients(start, last_work, full, capsys):
    """Each gets its status, slow readers are let go, and streams beside them go on."""
    limits = ServerLimits(header_seconds=2, body_seconds=3, stall_seconds=0.5)
    running, rounds = start(limits, Access([KEY])), 20 if full else 2
    crowd, found, cut = Crowd(running, KEY), Counter(), []
    authorization = f"Bearer {KEY}"

    async def one(kind: str, places: asyncio.Semaphore) -> None:
        async with places:
            try:
                found[kind, await rude(kind, running.port, running.model, KEY)] += 1
            except (ConnectionError, asyncio.IncompleteReadError) as error:  # a lost answer
                found[kind, type(error).__name__] += 1

    async def slow(i: int, places: asyncio.Semaphore) -> None:
        body = question(CHAT, running.model, f"slow {i}: hello", 400, stream=True)
        body |= {"logprobs": True, "top_logprobs": 20}
        async with places:
            cut.append(await read_slowly(running.port, CHAT, body, 4, authorization=authorization))

    async def all_of_them() -> None:
        places, seats = asyncio.Semaphore(24), asyncio.Semaphore(4)
        rudely = [one(kind, places) for _ in range(rounds) for kind in RUDE]
        await asyncio.gather(*rudely, *(slow(i, seats) for i in range(rounds)))

    async def once() -> None:
        body = question(CHAT, running.model, "once: hello", 400, stream=True)
        await ask(running.port, CHAT, body, authorization=authorization)

    asyncio.run(once())
    running.wait_until(lambda: not running.server.server_state.connections)
    gc.collect()  # what other tests left
    before = census(running)
    asyncio.run(crowd.stream_beside(all_of_them()))
    with capsys.disabled():
        print(
            f"\n{found.total()} rude clients and {len(cut)} slow readers; {crowd.good} replies beside them, "
            f"{max(crowd.gaps):.3f} s between two pieces at most"
        )
    assert found == {(kind, status): rounds for kind, status in RUDE.items()}
    assert all(cut) and max(crowd.gaps) < STALL
    assert not what_stays(running, before)
    assert (held := pages(running)).is_sound, held


def test_nothing_waits_for_the_collector(start, last_work):
    """What a request held is freed at its end. Cycles would grow until Python looks for them: minutes of the
    load above, and tens of megabytes."""
    running = start(access=Access([KEY]))
    authorization = f"Bearer {KEY}"

    async def several() -> None:
        for path in APIS:
            for stream in (False, True):
                body = question(path, running.model, "once: hello", 5, stream)
                await ask(running.port, path, body, authorization=authorization)
        for kind in RUDE:
            if not kind.startswith("half"):
                await rude(kind, running.port, running.model, KEY)
        body = question(CHAT, running.model, "once: hello", 300, True)
        await leave_early(running.port, CHAT, body, "between", random.Random(1), authorization=authorization)

    def garbage() -> Counter:
        connections = running.server.server_state.connections
        running.wait_until(lambda: not running.serving.is_busy and not connections)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        ours = [type(each) for each in gc.garbage if type(each).__module__.startswith("ruvmlx.")]
        gc.garbage.clear()
        return Counter(kind.__name__ for kind in ours)

    asyncio.run(several())
    gc.collect()
    gc.disable()
    try:
        asyncio.run(several())
        assert not garbage()
    finally:
        gc.enable()
