"""kill -9 at random moments of rating, training, copying and undoing, many times on one store: acknowledged
work is there, the log's chain holds, and the adapter loads.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model
from ruvmlx.sona import instant
from ruvmlx.sona.wiring import open_learner
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement

LIFE = 3.0  # seconds at most, after the first rating

# Forks a life for every line it reads. MLX must not be imported before a fork: its threads would be missing.
LIVES = """
import os, signal, sys
from ruvmlx.settings import Settings as RuntimeSettings, store_file
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.store import Store

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def live(seed):
    from ruvmlx.sona import background, promotion
    background.SAVE_EVERY, promotion.objection = 1, lambda *a: ""  # every base is promoted
    settings = background.TrainingSettings(steps=2, lr=4e-3, warmup=1, rank=2, minimum=4)
    with Runtime(Store(store_file()), model, backend, RuntimeSettings(kv_disk=None)) as runtime:
        for i in range(10_000):
            request = GenerationRequest(
                prompt="question", max_new_tokens=7, sampling=Sampling(seed=9_000 * seed + i), ignore_eos=True
            )
            list(runtime.writer.generate(request))
            runtime.learning.settle()
            runtime.rate(request.request_id, "up" if i % 3 else "down")
            say("rated", request.request_id)
            if i % 4 == 1:
                say("trained", runtime.learning.consolidate(settings=settings)["promoted"])
            if i % 4 == 2:
                runtime.store.adapters.copy(model.fingerprint, "default", f"copy-{seed}-{i}")
            if i % 4 == 3:
                runtime.undo()

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
model = load_model(sys.argv[1])
backend = NativeBackend(model, threads=1)
for line in sys.stdin:
    if line.strip() == "sync":
        say("sync")
    elif (child := os.fork()) == 0:
        try:
            live(int(line))
        finally:
            os._exit(1)
    else:
        say("born", child)
"""


class Lives:
    """One process after another on the same store, each killed."""

    def __init__(self, folder, home):
        self._rng = random.Random(0)
        environment = {**os.environ, "RUVMLX_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self._parent = subprocess.Popen(
            [sys.executable, "-c", LIVES, str(folder)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._parent.kill()
        self._parent.communicate()

    def one(self, seed: int) -> list[str]:
        """Run one process until it is killed; return its output."""
        said = []
        child = int(self._ask(str(seed), "born").split()[1])
        if self._rng.random() < 0.8:  # some die before they have done anything
            said.append(self._parent.stdout.readline())
        time.sleep(self._rng.random() ** 2 * LIFE)
        os.kill(child, signal.SIGKILL)
        self._ask("sync", "sync", said)  # a pipe keeps its order
        return said

    def _ask(self, words: str, answer: str, meanwhile: list[str] | None = None) -> str:
        self._parent.stdin.write(words + "\n")
        while not (line := self._parent.stdout.readline()).startswith(answer):
            assert line and meanwhile is not None, f"it ended by itself: {line!r}"
            meanwhile.append(line)
        return line


def test_killed_at_any_moment(home, tiny_folder, tiny_whitening, whole_text, full):
    tiny, path = load_model(str(tiny_folder)), home / "ruvmlx.db"
    backend = NativeBackend(tiny, threads=1)
    with closing(Store(path)) as store:
        store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        open_learner(store, tiny, backend, "default")  # reads the reference text, once for all
    acknowledged, promotions, lives = set(), 0, 1000 if full else 6
    with Lives(tiny_folder, home) as processes:
        for life in range(lives):
            said = processes.one(life)
            acknowledged |= {line.split()[1] for line in said if line.startswith("rated")}
            promotions += sum(line == "trained True\n" for line in said)
            with closing(Store(path)) as store:
                assert store.integrity() == "ok"
                assert store.witness.check().broken is None and disagreement(store) == ""
                rated = {row[0] for row in store.db.rows("SELECT reply_id FROM ratings")}
                assert acknowledged <= rated
                for row in store.adapters.all(tiny.fingerprint):
                    learner = open_learner(store, tiny, backend, row.name)
                    assert learner.version == row.version
                    assert learner.probe.kl(learner.micro) <= instant.KL_CAP + 1e-4
                    if row.name != "default":
                        store.adapters.delete(tiny.fingerprint, row.name)
    assert len(acknowledged) > lives // 2
    assert promotions or not full  # six lives may all be too short to train in, on a slow machine
