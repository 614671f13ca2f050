"""Many connections for minutes: good, slow, rude and rating clients on one `ruvmlx serve`."""

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter

import pytest

from .clients import APIS, CHAT, MOMENTS, RUDE, ask, leave_early, question, read_slowly, rude

KEY = "a-key-of-sixteen-characters"
STALL = 10.0  # seconds between two events of a stream
GOOD = {200, 429}  # 64 replies at a time
WORDS = "A long conversation about rivers, stones, the sea and the wind above them all. " * 4
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def server(tiny_folder, home, tmp_path):
    """(process, port, model) of `ruvmlx serve`; its log is in the file `log`."""
    command = [sys.executable, "-m", "ruvmlx", "serve", "--json", "--port", "0", "--api-key", KEY]
    command += ["--model", str(tiny_folder), "--backend", "native"]
    environment = {**os.environ, "RUVMLX_HOME": str(home), "RUVMLX_KV_DISK": "8"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, text=True, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log
        )
        facts = json.loads(process.stdout.readline())
        yield process, int(facts["base_url"].split(":")[2][:-3]), facts["model"]
        process.kill()
        process.communicate()


class Crowd:
    """People who come again and again. statuses: by what they did; gaps: the longest of each stream, with its
    time."""

    def __init__(self, port: int, model: str, seconds: float):
        self.port, self.model, self.until = port, model, time.monotonic() + seconds
        self.statuses, self.gaps, self.rng = Counter(), [], random.Random(0)
        self.pause = 15 if seconds > 60 else 1  # a thousand ratings take megabytes of their own
        self.headers = {"authorization": f"Bearer {KEY}"}

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def question(self, path: str, stream: bool) -> dict:
        """A third of the questions begin alike."""
        start = 0 if self.rng.random() < 0.3 else self.rng.randrange(60)
        text = WORDS[start : start + self.rng.randrange(20, 200)]
        return question(path, self.model, text, self.rng.randrange(5, 80), stream)

    async def person(self, i: int) -> None:
        does = {6: self.rater, 7: self.leaver, 8: self.slow, 9: self.rude}.get(i % 10, self.good)
        while not self.is_over:
            await does()

    async def good(self) -> None:
        path, stream = self.rng.choice(APIS), self.rng.random() < 0.7
        got = await ask(self.port, path, self.question(path, stream), **self.headers)
        self.statuses["good", got.status] += 1
        self.gaps.append(max(got.gaps, default=0.0))
        if got.status == 200 and stream:
            assert got.body.rstrip().endswith((b"[DONE]", b"}")) and b'"error":{' not in got.body, got.body
        if got.status == 429:
            await asyncio.sleep(int(got.headers["retry-after"]))

    async def rater(self) -> None:
        got = await ask(self.port, CHAT, self.question(CHAT, False), **self.headers)
        self.statuses["rater", got.status] += 1
        if got.status == 200:
            body = {"id": got.json["id"], "rating": self.rng.choice(["up", "down", "4"])}
            rated = await ask(self.port, "/v1/ratings", body, **self.headers)
            self.statuses["rating", rated.status] += 1
        await asyncio.sleep(self.pause)

    async def leaver(self) -> None:
        path = self.rng.choice(APIS)
        body, moment = self.question(path, self.rng.random() < 0.7), self.rng.choice(MOMENTS)
        await leave_early(self.port, path, body, moment, self.rng, **self.headers)

    async def slow(self) -> None:
        body = self.question(CHAT, True)
        await read_slowly(self.port, CHAT, body, self.rng.random() * 10, **self.headers)

    async def rude(self) -> None:
        kind = self.rng.choice([*RUDE])
        if self.until - time.monotonic() > 40 or not kind.startswith("half"):  # those take up to 30 s
            self.statuses[kind, await rude(kind, self.port, self.model, KEY)] += 1

    async def all(self, people: int, watch) -> None:
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.gather(*(self.person(i) for i in range(people)))
        finally:
            watching.cancel()


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_many_connections(server, full, tmp_path, capsys):
    """200 for ten minutes: no stream stalls, each gets the status that it should, and from the second minute
    on the memory stays within 2%."""
    process, port, model = server
    people, seconds = (200, 600) if full else (20, 5)
    crowd, used = Crowd(port, model, seconds), list[tuple[float, int]]()
    begun = time.monotonic()

    async def watch() -> None:
        while True:
            used.append((time.monotonic() - begun, resident(process.pid)))
            await asyncio.sleep(1)

    asyncio.run(crowd.all(people, watch))
    minutes = [statistics.median(n for at, n in used if at // 60 == i) for i in range(-(-seconds // 60))]
    good = sum(n for (who, status), n in crowd.statuses.items() if (who, status) == ("good", 200))
    with capsys.disabled():
        shown = ", ".join(f"{n / 1e6:.1f}" for n in minutes)
        print(f"\n{people} connections, {seconds} s: {good} good replies, two events at most")
        print(f"{max(crowd.gaps):.2f} s apart; MB by minute: {shown}; {dict(sorted(crowd.statuses.items()))}")
    wrong = {
        (who, status)
        for who, status in crowd.statuses
        if status not in ({RUDE[who]} if who in RUDE else {200} if who == "rating" else GOOD)
    }
    assert not wrong and good and crowd.statuses["rating", 200]
    assert max(crowd.gaps) < STALL
    assert process.poll() is None and (asyncio.run(ask(port, "/health"))).status == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and '"error"' not in log and "rivers" not in log
    if full:
        late = [n for at, n in used if at > 120]
        assert statistics.median(late[-30:]) < 1.02 * statistics.median(late[:30])
