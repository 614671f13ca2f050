"""Who waits how long for a real `ruvmlx serve`, and what it does when nobody asks.

    python -m tests.server.waits [MODEL] [--long TOKENS] [--prompts N]     # the starter model: some minutes

A report: it prints each figure beside its limit, and its exit code is 1 if one is over it. The server has one
thread for its model, and the clock is its processor time (on Linux): other programs on the machine do not
count. The rules are in "Who waits for whom" of docs/serve.md.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.engine.test_reading_order import equal_shares

from .clients import CHAT, Wire, ask, question, request

WORDS = ["river", "stone", "sea", "wind", "bird", "tree", "cloud", "field", "road", "house", "light", "hill"]
LENGTHS = (8, 40, 200, 1000)  # words of a prompt
REPLY = 5  # tokens of a reply whose first token is measured
STREAMS, PACED, LONG_REPLY = 32, 4, 400  # streams beside a question; beside a long prompt; tokens of each
AFTER = 30.0  # seconds from the last request to the look at what the server does
LOOK = 20.0  # seconds of the look
MOST_IDLE, MOST_SHARE = 0.03, 2.0  # of a core; times its fair share
MOST_ALONE, MOST_LATER = 3.0, 0.2  # times the time alone, and seconds besides
MOST_GAP = 2.0  # times the gap between two tokens without a long prompt
MOST_RATED, MOST_STOP = 3.0, 1.5  # times this gap, and seconds, while the first rating measures the model


@dataclass(frozen=True)
class Times:
    """Moments of one request on the server's clock: it was sent, a token came, it ended."""

    sent: float
    tokens: tuple[float, ...]
    ended: float

    @property
    def first(self) -> float:
        return self.tokens[0] if self.tokens else self.ended

    @property
    def wait(self) -> float:
        return self.first - self.sent

    @property
    def work(self) -> float:
        return self.ended - self.sent


class Server:
    """A running server. Each question has words that no question had before."""

    def __init__(self, process: int, port: int, model: str):
        self.port, self.model, self._rng = port, model, random.Random(0)
        self._clock = clock_of(process)

    def clock(self) -> float:
        """Seconds of processor time since the server started."""
        return time.clock_gettime(self._clock)

    async def is_working(self) -> bool:
        """Whether the server names work that it does while nobody asks."""
        return (await ask(self.port, "/v1/status")).json["idle_work"] is not None

    async def times(self, words: int, reply: int = REPLY, writes: asyncio.Event | None = None) -> Times:
        """Ask a question of so many words, as a stream. reply: its most tokens. `writes` is set after its
        first token."""
        text = " ".join(self._rng.choices(WORDS, k=words))
        body = question(CHAT, self.model, text, reply, stream=True)
        sent, tokens = self.clock(), list[float]()
        async with await Wire.open(self.port) as wire:
            await wire.send(b"".join(request(CHAT, body)))
            answer = await wire.head()
            assert answer.status == 200, await anext(wire.pieces(answer))
            async for piece in wire.pieces(answer):
                if b'"content":"' in piece.replace(b'"content":""', b""):
                    tokens.append(self.clock())
                    if writes is not None:
                        writes.set()
        return Times(sent, (*tokens,), self.clock())


def clock_of(process: int) -> int:
    """The id of a process's clock."""
    found = ctypes.c_int()
    failed = ctypes.CDLL(None).clock_getcpuclockid(process, ctypes.byref(found))
    assert not failed, os.strerror(failed)
    return found.value


@contextlib.contextmanager
def start_server(model: str | None) -> Iterator[Server]:
    """A server with a data folder of its own."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "RUVMLX_HOME": home, "RUVMLX_THREADS": "1"}
        command = [sys.executable, "-m", "ruvmlx", "serve", "--port", "0", "--json"]
        command += ["--model", model] if model else []
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            yield Server(process.pid, int(facts["base_url"].split(":")[2].split("/")[0]), facts["model"])
        finally:
            process.terminate()
            process.wait()


async def short_beside_long(server: Server, words: int) -> bool:
    """A short question that comes while a long prompt is read."""
    alone = statistics.median([(await server.times(8)).wait for _ in range(3)])
    long = asyncio.create_task(server.times(words))
    begun = server.clock()
    while server.clock() < begun + 1:
        await asyncio.sleep(0.1)
    short = await server.times(8)
    assert not long.done(), "the long prompt was read before the short one came; give more --long tokens"
    most = MOST_ALONE * alone + MOST_LATER
    later = (await long).wait
    print(f"a short question beside a prompt of {words} words: first token after {short.wait:.2f} s")
    print(f"  alone {alone:.2f} s; limit {most:.2f} s; the long prompt's after {later:.1f} s", flush=True)
    return short.wait <= most


async def short_beside_streams(server: Server, count: int) -> bool:
    """A short question that comes while many replies are written: each of them has its first token."""
    alone = statistics.median([(await server.times(8)).wait for _ in range(3)])
    writing = [asyncio.Event() for _ in range(count)]
    begun = server.clock()
    streams = [asyncio.create_task(server.times(20, LONG_REPLY, event)) for event in writing]
    await asyncio.gather(*(event.wait() for event in writing))
    read = server.clock() - begun
    short = await server.times(8)
    running = sum(not stream.done() for stream in streams)
    await asyncio.gather(*streams)
    most = MOST_ALONE * alone + MOST_LATER
    print(f"a short question beside {running} streams: first token after {short.wait:.2f} s")
    print(f"  alone {alone:.2f} s; limit {most:.2f} s; all streams write after {read:.1f} s", flush=True)
    return short.wait <= most


async def streams_beside_long(server: Server, words: int, count: int) -> bool:
    """The gaps between the tokens of streams before and while a long prompt is read."""
    streams = [asyncio.create_task(server.times(20, LONG_REPLY)) for _ in range(count)]
    begun = server.clock()
    while server.clock() < begun + 1.5:
        await asyncio.sleep(0.1)
    long = await server.times(words)
    before, beside = gaps_of([await stream for stream in streams], long)
    median = statistics.median(beside) / statistics.median(before)
    mean = statistics.mean(beside) / statistics.mean(before)
    print(
        f"{count} streams beside a prompt of {words} words: the median gap is {median:.2f} times that before"
    )
    print(f"  the mean {mean:.2f} times; {len(beside)} gaps; limit {MOST_GAP:g}", flush=True)
    return median <= MOST_GAP


async def streams_beside_first_rating(server: Server, count: int) -> bool:
    """The gaps between the tokens of streams before and while the first rating of a new model waits for the
    model's measurement."""
    body = question(CHAT, server.model, "Name a river.", REPLY, stream=False)
    rated = (await ask(server.port, CHAT, body)).json["id"]
    streams = [asyncio.create_task(server.times(20, LONG_REPLY)) for _ in range(count)]
    begun = server.clock()
    while server.clock() < begun + 2:
        await asyncio.sleep(0.1)
    sent = server.clock()
    answer = await ask(server.port, "/v1/ratings", {"id": rated, "rating": "up"})
    assert answer.status == 200, answer.json
    end = server.clock()
    before, _ = gaps_of(found := [await stream for stream in streams], Times(sent, (end,), end))
    beside = [
        last - first
        for stream in found
        for first, last in pairwise(stream.tokens)
        if sent < last and first < end
    ]
    print(f"the first rating beside {count} streams: answered after {end - sent:.2f} s")
    median, longest = statistics.median(beside) / statistics.median(before), max(beside)
    print(f"  the median gap is {median:.2f} times that before, limit {MOST_RATED:g}; {len(beside)} gaps")
    print(f"  the longest gap {longest:.2f} s, limit {MOST_STOP:g} s", flush=True)
    return median <= MOST_RATED and longest <= MOST_STOP


def gaps_of(streams: Sequence[Times], long: Times) -> tuple[list[float], list[float]]:
    """The gaps between tokens before a long prompt was sent, and while it was read. Tokens that came in one
    piece have none."""
    found = [pair for stream in streams for pair in pairwise(stream.tokens) if pair[1] > pair[0]]
    before = [last - first for first, last in found if last <= long.sent]
    return before, [last - first for first, last in found if long.sent < first and last <= long.first]


async def fair_shares(server: Server, count: int) -> bool:
    """Many prompts of mixed length at once, each with its share of the machine."""
    rng = random.Random(3)
    sizes = [rng.choice(LENGTHS) for _ in range(count)]
    work = {size: (await server.times(size)).work for size in sorted(set(sizes))}
    found = await asyncio.gather(*(server.times(size) for size in sizes))
    fair = equal_shares([(t.sent, work[size], 1.0) for t, size in zip(found, sizes, strict=True)])
    shares = [t.wait / (fair[i] - t.sent) for i, t in enumerate(found)]
    print(f"{count} prompts of {min(sizes)} to {max(sizes)} words at once: the latest first token after")
    print(
        f"  {max(shares):.2f} times its fair share, the median after {statistics.median(shares):.2f}; "
        f"limit {MOST_SHARE:g}",
        flush=True,
    )
    return max(shares) <= MOST_SHARE


async def rest(server: Server) -> bool:
    """Whether a server that nobody has asked for AFTER seconds rests. Work that it names ends first."""
    await asyncio.sleep(AFTER)
    while await server.is_working():
        await asyncio.sleep(1)
    before, begun = server.clock(), time.monotonic()
    await asyncio.sleep(LOOK)
    share = (server.clock() - before) / (time.monotonic() - begun)
    print(f"{AFTER:g} s after the last request: {share:.1%} of a core for {LOOK:g} s; limit {MOST_IDLE:.0%}")
    return share < MOST_IDLE


async def report(server: Server, words: int, count: int) -> bool:
    """Measure all of it; returns whether each figure is within its limit."""
    await server.times(8)  # the first reply warms the model
    return all([
        await streams_beside_first_rating(server, PACED),
        await short_beside_long(server, words),
        await short_beside_streams(server, STREAMS),
        await streams_beside_long(server, words // 2, PACED),
        await fair_shares(server, count),
        await rest(server),
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="the starter model by default")
    parser.add_argument("--long", type=int, default=4096, help="words of the long prompt")
    parser.add_argument("--prompts", type=int, default=16, help="prompts that come at once")
    given = parser.parse_args()
    with start_server(given.model) as server:
        return int(not asyncio.run(report(server, given.long, given.prompts)))


if __name__ == "__main__":
    sys.exit(main())
