"""Many processes rate replies of one adapter while one trains, one deletes chats and one serves.

    python -m tests.campaigns.many_processes [--raters 16] [--ratings 500]

No rating may be refused, lost or doubled, and no process may be left waiting. The model is tiny and random.
test_many_processes.py runs a small sample.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model
from ruvmlx.sona.wiring import open_learner
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement

from ..models.make_models import make_safetensors_model

BEGIN = """
import sys, time
from ruvmlx.settings import Settings, store_file
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.store import Store

model, seed, count = load_model(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def reply(runtime, i, chat=None):
    request = GenerationRequest(
        prompt="question", max_new_tokens=5, sampling=Sampling(seed=1000 * seed + i), ignore_eos=True
    )
    list(runtime.writer.generate(request, chat))
    return request.request_id

runtime = Runtime(Store(store_file()), model, NativeBackend(model, threads=1), Settings(kv_disk=None))
"""
# Writes its own replies, waits for a line, rates them all, and prints what was acknowledged after how long.
RATER = """
with runtime:
    ids = [reply(runtime, i) for i in range(count)]
    runtime.learning.settle()
    print("ready", flush=True)
    sys.stdin.readline()
    for i, reply_id in enumerate(ids):
        begun = time.monotonic()
        runtime.rate(reply_id, "up" if i % 3 else "down")
        print(reply_id, time.monotonic() - begun, flush=True)
"""
# Trains the base LoRA again and again until the standard input ends; every base is promoted.
TRAINER = """
import threading
from ruvmlx.sona import background, promotion
promotion.objection = lambda *a: ""
settings = background.TrainingSettings(steps=2, lr=4e-3, warmup=1, rank=2, minimum=4)
ended = threading.Event()
with runtime:
    print("ready", flush=True)
    sys.stdin.readline()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        report = runtime.learning.consolidate(settings=settings)
        print("promoted" if report["promoted"] else "refused", flush=True)
        ended.wait(0.2)
"""
# Writes chats and deletes them for good until the standard input ends.
DELETER = """
import threading
ended = threading.Event()
with runtime:
    print("ready", flush=True)
    sys.stdin.readline()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    i = 0
    while not ended.is_set():
        chat = runtime.store.chats.new("tiny")
        for i in range(i + 1, i + 4):
            runtime.store.messages.add_user(chat, f"a question of chat {chat}")
            reply(runtime, i, chat)
        runtime.store.chats.delete(chat)
        print(chat, flush=True)
"""


@dataclass
class Figures:
    """What the campaign found. waits: seconds of each rater's acknowledged rating, by the reply's id."""

    waits: dict[str, float] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)  # replies whose rating the server acknowledged
    promoted: int = 0
    deleted: int = 0
    seconds: float = 0.0  # of rating

    def lines(self) -> list[str]:
        waits = sorted(self.waits.values())
        tail = waits[int(0.99 * (len(waits) - 1))]
        return [
            f"{len(waits):,} ratings in {self.seconds:.0f} s: {len(waits) / self.seconds:.1f} a second",
            f"a rating: median {statistics.median(waits) * 1e3:.0f} ms, 99% within {tail * 1e3:.0f} ms, "
            f"the longest {waits[-1]:.1f} s",
            f"meanwhile {len(self.served)} ratings over HTTP, {self.promoted} promoted trainings, "
            f"{self.deleted} deleted chats",
            "none refused, lost or doubled; the chain whole, the store sound, no process left",
        ]


class Server:
    """`ruvmlx serve` on the store, and a client that asks and rates until it is told to stop."""

    def __init__(self, home: Path, model: Path):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ruvmlx", "serve", "--json", "--port", "0", "--model", str(model)],
            env={**os.environ, "RUVMLX_HOME": str(home)}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._ready = json.loads(self._process.stdout.readline())
        self.rated: list[str] = []
        self.failure: BaseException | None = None
        self._is_over = threading.Event()
        self._client = threading.Thread(target=self._work)

    def start(self) -> None:
        self._client.start()

    def stop(self) -> int:
        """End the client, then the server; the server's exit code."""
        self._is_over.set()
        self._client.join()
        self._process.terminate()
        return self._process.wait(60)

    def kill(self) -> None:
        self._is_over.set()
        self._process.kill()

    def _work(self) -> None:
        try:
            while not self._is_over.is_set():
                asked = {"model": self._ready["model"], "prompt": "question", "max_tokens": 5}
                reply = self._ask("/completions", asked)["id"]
                self._ask("/ratings", {"id": reply, "rating": "up"})
                self.rated.append(reply)
        except BaseException as error:  # noqa: BLE001 - the campaign's main thread raises it
            self.failure = error

    def _ask(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self._ready["base_url"] + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


def start(home: Path, model: Path, program: str, seed: int, count: int) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + program, str(model), str(seed), str(count)],
        env={**os.environ, "RUVMLX_HOME": str(home)}, text=True, stdin=pipe, stdout=pipe, stderr=pipe,
    )  # fmt: skip


def campaign(home: Path, model: Path, raters: int, count: int) -> Figures:
    """Run it on the store of this data folder, which has the measurements of the model and nothing else.
    AssertionError if a rating is refused, lost or doubled, a process fails, or the store is not sound."""
    tiny, path, figures = load_model(str(model)), home / "ruvmlx.db", Figures()
    with closing(Store(path)) as store:
        open_learner(store, tiny, NativeBackend(tiny, threads=1), "default")
        kept = store.chats.new("tiny", title="kept")
        store.messages.add_user(kept, "words that stay")
    children = [start(home, model, RATER, seed, count) for seed in range(raters)]
    others = [start(home, model, program, raters, 0) for program in (TRAINER, DELETER)]
    server = Server(home, model)
    try:
        for child in children + others:
            assert child.stdout.readline() == "ready\n", child.communicate()[1][-300:]
        begun = time.monotonic()
        for child in children + others:
            child.stdin.write("go\n")
            child.stdin.flush()
        server.start()
        ended = [child.communicate() for child in children]
        figures.seconds = time.monotonic() - begun
        server_code = server.stop()
        (trained, deleted) = [child.communicate()[0].split() for child in others]
    finally:
        server.kill()
        for child in children + others:
            child.kill()
    assert [errors[-300:] for _, errors in ended] == [""] * raters
    assert [child.returncode for child in children + others] == [0] * (raters + 2)
    assert (server.failure, server_code) == (None, 0)
    for said, _ in ended:
        for line in said.splitlines():
            reply_id, seconds = line.split()
            figures.waits[reply_id] = float(seconds)
    figures.served, figures.promoted, figures.deleted = server.rated, trained.count("promoted"), len(deleted)
    check(path, tiny.fingerprint, figures, raters * count, kept)
    return figures


def check(path: Path, fingerprint: str, figures: Figures, wanted: int, kept: str) -> None:
    """Each acknowledged rating is in the store once, each with its version, and all agrees with the log."""
    acknowledged = [*figures.waits, *figures.served]
    with closing(Store(path)) as store:
        rated = [row[0] for row in store.db.rows("SELECT reply_id FROM ratings")]
        assert sorted(rated) == sorted(acknowledged) and len(figures.waits) == wanted
        assert figures.promoted and figures.deleted and store.chats.ids() == {kept}
        # Each rating and each promoted base is a version.
        assert store.versions.head(fingerprint, "default") == len(acknowledged) + figures.promoted
        assert store.witness.check().broken is None and disagreement(store) == ""
        assert store.search.find("question") == [] and store.search.find("words") != []
        assert store.integrity() == "ok"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--raters", type=int, default=16)
    parser.add_argument("--ratings", type=int, default=500, help="of each rater")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ruvmlx-campaign-") as folder:
        model = make_safetensors_model(Path(folder, "tiny-llama"), max_context=512)
        home = Path(folder, "home")
        home.mkdir(0o700)
        print("\n".join(campaign(home, model, given.raters, given.ratings).lines()))


if __name__ == "__main__":
    main()
