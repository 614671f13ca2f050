"""kill -9 of a server at random moments, many times on one data folder: the store is whole, the next start
serves, and no page of a torn file is used."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model
from ruvmlx.sona.wiring import open_learner
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement

from .clients import APIS, CHAT, ask, question

LIFE = 1.2  # seconds at most, under load
WORDS = "Once upon a time the river told the stones about the sea, and the stones told the wind. " * 5
PROMPTS = [f"{WORDS[:200]}{i}{WORDS[i : i + 90]}" for i in range(4)]  # three pages that all share
SETTINGS = {"KV_DISK": "2", "THREADS": "1"}
# Two ways to write pages: at once where a sequence makes room, and early in another thread.
F16, TIERED = {"KV": "f16", "KV_BUDGET": "1"}, {"KV": "tiered", "KV_TIERS": "64,128"}
GONE = asyncio.IncompleteReadError, ConnectionError

# Forks `ruvmlx serve` for every line it reads: imports take longer than the life of a server.
LIVES = """
import os, signal, sys
from ruvmlx.apps.cli import run
import ruvmlx.apps.server.app, ruvmlx.apps.server.idle, ruvmlx.apps.server.web
import ruvmlx.backends.native.backend, ruvmlx.host.host, ruvmlx.models.load, ruvmlx.sona.wiring

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

log = sys.argv.pop()
for line in sys.stdin:
    if line.startswith("end"):
        while int(line.split()[1]) != os.wait()[0]:
            pass
        say("ended")
    elif (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os._exit(run())
    else:
        say("born", child)
"""


class Lives:
    """One server after another, with the same flags."""

    def __init__(self, model, home, log, **settings):
        variables = {f"RUVMLX_{name}": value for name, value in {**SETTINGS, **settings}.items()}
        flags = ["serve", "--json", "--port", "0", "--backend", "native", "--model", str(model)]
        self._parent = subprocess.Popen(
            [sys.executable, "-c", LIVES, *flags, str(log)], text=True, bufsize=1,
            env={**os.environ, **variables, "RUVMLX_HOME": str(home), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._child = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self._child:
            os.kill(self._child, signal.SIGKILL)  # it has the other end of the pipe, too
        self._parent.kill()
        self._parent.communicate()

    def begin(self) -> int:
        self._parent.stdin.write("begin\n")
        self._child = int(self._parent.stdout.readline().split()[1])
        return self._child

    def ready(self) -> tuple[int, str]:
        """(port, model) when it serves."""
        line = self._parent.stdout.readline()
        assert line.startswith("{"), f"it did not start: {line!r}"
        facts = json.loads(line)
        return int(facts["base_url"].split(":")[2][:-3]), facts["model"]

    def end(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Kill it, and wait for its end."""
        os.kill(pid, number)
        self._parent.stdin.write(f"end {pid}\n")
        while (line := self._parent.stdout.readline()) != "ended\n":
            assert line.startswith("{")  # it was ready after all
        self._child = 0


def greedy(port: int, model: str, prompt: str, user: str | None = None) -> tuple[str, float, int]:
    """(text of the untouched model's reply, logprob of its first token, tokens that were cached)"""
    body = question(CHAT, f"{model}@none", prompt, 12, stream=False, user=user, logprobs=True)
    got = asyncio.run(ask(port, CHAT, body))
    assert got.status == 200, got.body
    [choice], usage = got.json["choices"], got.json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return choice["message"]["content"], choice["logprobs"]["content"][0]["logprob"], cached


class Load:
    """Streams and ratings on one server. rated: replies whose rating was acknowledged."""

    def __init__(self, port: int, model: str, rng: random.Random):
        self.port, self.model, self.rng = port, model, rng
        self.rated, self.over = set[str](), False

    async def until(self, seconds: float, end) -> None:
        """Go on until end() has killed the server after some time."""
        work = [asyncio.ensure_future(self._again(self._stream)) for _ in range(3)]
        work += [asyncio.ensure_future(self._again(self._rate)) for _ in range(2)]
        await asyncio.sleep(seconds)
        self.over = True
        await asyncio.to_thread(end)
        await asyncio.gather(*work)

    async def _again(self, work) -> None:
        with contextlib.suppress(*GONE):
            while True:
                got = await work()
                assert got.status == 200 or (self.over and got.status == 503), got.body

    async def _stream(self):
        path, tokens = self.rng.choice(APIS), self.rng.randrange(20, 120)
        return await ask(self.port, path, question(path, self.model, self._prompt(), tokens, stream=True))

    async def _rate(self):
        got = await ask(self.port, CHAT, question(CHAT, self.model, self._prompt(), 6, stream=False))
        if got.status == 200:
            body = {"id": got.json["id"], "rating": self.rng.choice(["up", "down", 5])}
            rated = await ask(self.port, "/v1/ratings", body)
            if rated.status == 200:
                self.rated.add(body["id"])
            return rated
        return got

    def _prompt(self) -> str:
        prompt = self.rng.choice(PROMPTS)
        return prompt if self.rng.random() < 0.5 else prompt[:220] + str(self.rng.random())


def check_store(home, rated) -> None:
    """The store is whole: SQLite's own check, the log's chain, the tables beside the log, all ratings."""
    with closing(Store(home / "ruvmlx.db")) as store:
        assert store.db.value("PRAGMA integrity_check") == "ok"
        assert store.witness.check().broken is None and disagreement(store) == ""
        assert rated <= {row[0] for row in store.db.rows("SELECT reply_id FROM ratings")}


def unfinished_files(home) -> list:
    return list((home / "kv").glob("*.new"))


def damage(home, rng) -> bool:
    """Tear a file of the caches, as if the disk had not got all of it."""
    files = [path for path in (home / "kv").glob("*") if path.suffix not in (".uses", ".new")]
    if not files or rng.random() < 0.5:
        return False
    path = rng.choice(files)
    data, at = bytearray(path.read_bytes()), rng.randrange(path.stat().st_size)
    if rng.random() < 0.5:
        del data[at:]
    else:
        data[at:] = bytes(len(data) - at)
    path.write_bytes(data)
    return True


def test_killed_under_load(home, tiny_folder, tiny_whitening, whole_text, tmp_path, full, capsys):
    """A fifth of the kills come while it starts, a fifth while it stops. Files are torn besides."""
    tiny, log, rng = load_model(str(tiny_folder)), tmp_path / "log", random.Random(0)
    with closing(Store(home / "ruvmlx.db")) as store:
        store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        open_learner(store, tiny, NativeBackend(tiny, threads=1), "default")  # reads the reference text once
    with Lives(tiny_folder, home, log, **F16 | {"KV_DISK": "0"}) as lives:
        pid = lives.begin()
        port, model = lives.ready()
        expected = {prompt: greedy(port, model, prompt, prompt[200:]) for prompt in PROMPTS}
        lives.end(pid, signal.SIGTERM)
    counts, rated, begun = Counter(), set[str](), time.monotonic()
    with Lives(tiny_folder, home, log, **F16) as exact, Lives(tiny_folder, home, log, **TIERED) as tiered:
        for life in range(200 if full else 4):
            (home / "kv").mkdir(exist_ok=True)
            (home / "kv" / "torn.1.new").write_bytes(b"as if killed while it was written")
            lives, left = tiered if life % 2 else exact, unfinished_files(home)
            for path in left:
                os.utime(path, (time.time() - 100,) * 2)  # `CacheFolder.tidy` leaves those of a minute
            pid = lives.begin()
            if life % 5 == 3:
                time.sleep(rng.random() * 0.3)
                lives.end(pid)
                check_store(home, rated)
                continue
            port, model = lives.ready()
            assert not set(left) & set(unfinished_files(home))
            for prompt in rng.sample(PROMPTS, 2):
                text, logprob, cached = greedy(port, model, prompt)
                where = f"life {life}: {cached} tokens were cached"
                assert text == expected[prompt][0] or lives is tiered, where
                assert abs(logprob - expected[prompt][1]) < (0.1 if lives is tiered else 1e-3), where
                counts["tiered" if lives is tiered else "f16"] += cached
            load = Load(port, model, rng)

            def end(pid=pid, lives=lives, stops=life % 5 == 2) -> None:
                if stops:
                    os.kill(pid, signal.SIGTERM)
                    time.sleep(rng.random() * 0.1)
                lives.end(pid)

            asyncio.run(load.until(rng.random() ** 2 * LIFE, end))
            rated |= load.rated
            check_store(home, rated)
            counts["unfinished"] += len(unfinished_files(home))
            counts["torn"] += damage(home, rng)
        counts["lives"], counts["rated"] = life + 1, len(rated)
    with capsys.disabled():
        print(f"\n{dict(counts)} in {time.monotonic() - begun:.0f} s")
    assert (rated and counts["f16"]) or not full  # four lives may all be too short, on a slow machine
    assert "Traceback" not in log.read_text() and '"error"' not in log.read_text()
