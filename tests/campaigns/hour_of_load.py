"""A server under load for an hour, with evictions and trainings: its memory must stay flat.

    python -m tests.campaigns.hour_of_load                  one hour
    python -m tests.campaigns.hour_of_load --seconds 900
    python -m tests.campaigns.hour_of_load --no-ratings     nobody rates, so the server does not train

The people of test_soak.py (good, slow, rude, leaving and rating ones) come for some minutes. Then nobody
comes, so that the server trains on the new ratings. This repeats. The KV budget and the page store are so
small that chats are evicted. The campaign reads the resident memory of the server's process once a second
while people come. The first two rounds do not count, because the program loads its libraries and fills its
caches then.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from ..models.make_models import make_safetensors_model
from ..server.clients import ask
from ..server.test_soak import KEY, Crowd, resident

BUSY = 240.0  # seconds of a round in which people come
QUIET = 600.0  # the maximum number of seconds in which the server can train; it begins after 20
# other programs' load does not stop the trainings of this server
SERVER = """
from ruvmlx.platform.courtesy import Courtesy
Courtesy.reason_to_wait = lambda self: ""
from ruvmlx.apps.main import main
main()
"""
LIMIT = 1.02  # of the memory of the first counted round
SMALL = {"RUVMLX_KV_BUDGET": "400kB", "RUVMLX_KV_DISK": "2MB", "RUVMLX_SLOW_LOOP": "training"}


class Readers(Crowd):
    """The people of test_soak.py. After each answer, a good one reads for some seconds."""

    async def good(self) -> None:
        await super().good()
        await asyncio.sleep(self.rng.uniform(1, 5))


class NoRaters(Readers):
    """The same people, but nobody rates: the people who rate elsewhere only ask questions here."""

    async def rater(self) -> None:
        await self.good()


class Load:
    """One server and its rounds. crowd: the class of the people. rounds: the resident memory in bytes, once a
    second, of each round."""

    def __init__(self, folder: Path, people: int, crowd: type[Readers]):
        self.people, self.log, self.rounds = people, folder / "log", list[list[int]]()
        self.crowd = crowd
        model = make_safetensors_model(folder / "tiny-llama", max_context=512)
        command = [sys.executable, "-c", SERVER, "serve", "--json", "--port", "0", "--api-key", KEY]
        command += ["--model", str(model), "--backend", "native"]
        environment = {**os.environ, **SMALL, "RUVMLX_HOME": str(folder / "home")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, text=True, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        facts = json.loads(self.process.stdout.readline())
        self.port, self.model = int(facts["base_url"].split(":")[2][:-3]), facts["model"]

    def round(self) -> Readers:
        """Let people use the server. If they rated, let nobody use it until a training has ended."""
        crowd, used, before = self.crowd(self.port, self.model, BUSY), list[int](), self.trainings()

        async def watch() -> None:
            while True:
                used.append(resident(self.process.pid))
                await asyncio.sleep(1)

        asyncio.run(crowd.all(self.people, watch))
        self.rounds.append(used)
        quiet_until = time.monotonic() + (QUIET if crowd.statuses["rating", 200] else 0)
        while time.monotonic() < quiet_until and self.trainings() == before:
            time.sleep(1)
        return crowd

    def trainings(self) -> int:
        """Return how many trainings in idle time ran to their end, promoted or refused."""
        return self.log.read_text().count('"promoted":')

    def gauge(self, name: str) -> float:
        """Return a figure of the server's metrics."""
        got = asyncio.run(ask(self.port, "/metrics", authorization=f"Bearer {KEY}"))
        found = re.search(rf"^{re.escape(name)} ([\d.]+)$", got.body.decode(), re.MULTILINE)
        assert found, f"the metrics have no {name}"
        return float(found[1])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--people", type=int, default=40)
    parser.add_argument("--no-ratings", action="store_true")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends, too
    with tempfile.TemporaryDirectory(prefix="ruvmlx-load-") as folder, ExitStack() as stack:
        load = Load(Path(folder), given.people, NoRaters if given.no_ratings else Readers)
        stack.callback(load.process.kill)
        good = rated = 0
        while time.monotonic() < until:
            crowd = load.round()
            good += crowd.statuses["good", 200]
            rated += crowd.statuses["rating", 200]
            here, kv = statistics.median(load.rounds[-1]) / 1e6, load.gauge("ruvmlx_kv_bytes") / 1e6
            read = load.gauge("ruvmlx_prompt_tokens_total") + load.gauge("ruvmlx_generated_tokens_total")
            did = f"{good:,} good replies, {rated:,} ratings, {load.trainings()} trainings"
            print(f"{len(load.rounds)}: {here:.1f} MB, KV {kv:.1f}; {did}, {read:,.0f} tokens", flush=True)
        counted = [statistics.median(used) for used in load.rounds[min(2, len(load.rounds) - 1) :]]
        growth, most = counted[-1] / counted[0], max(counted) / counted[0]
        print(f"memory from the third round to the last: {growth - 1:+.1%}; at most {most - 1:+.1%}")
        ended = load.stop()
        trained = load.trainings()
    sys.exit(most > LIMIT or ended != 0 or (trained == 0) != given.no_ratings)


if __name__ == "__main__":
    main()
