"""Many processes rate replies of one adapter while one trains and one deletes chats: no rating is refused,
lost or doubled, and no process is left waiting.
"""

import os
import subprocess
import sys
from contextlib import closing

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model
from ruvmlx.sona.wiring import open_learner
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement

BEGIN = """
import sys
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
    list(runtime.generate(request, chat))
    return request.request_id

runtime = Runtime(Store(store_file()), model, NativeBackend(model, threads=1), Settings(kv_disk=None))
"""
# Writes its own replies, waits for a line, rates them all, and prints what was acknowledged.
RATER = """
with runtime:
    ids = [reply(runtime, i) for i in range(count)]
    runtime.settle()
    print("ready", flush=True)
    sys.stdin.readline()
    for i, reply_id in enumerate(ids):
        runtime.rate(reply_id, "up" if i % 3 else "down")
        print(reply_id, flush=True)
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
        report = runtime.consolidate(settings=settings)
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


def start(home, model, program, seed, count):
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + program, str(model), str(seed), str(count)],
        env={**os.environ, "RUVMLX_HOME": str(home)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_many_processes_rate_while_one_trains_and_one_deletes(
    home, tiny_folder, tiny_whitening, whole_text, full
):
    raters, count = (16, 500) if full else (4, 12)
    tiny, path = load_model(str(tiny_folder)), home / "ruvmlx.db"
    with closing(Store(path)) as store:
        store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        open_learner(store, tiny, NativeBackend(tiny, threads=1), "default")
        kept = store.chats.new("tiny", title="kept")
        store.messages.add_user(kept, "words that stay")
    children = [start(home, tiny_folder, RATER, seed, count) for seed in range(raters)]
    others = [start(home, tiny_folder, program, raters, 0) for program in (TRAINER, DELETER)]
    assert [child.stdout.readline() for child in children + others] == ["ready\n"] * (raters + 2)
    for child in children + others:
        child.stdin.write("go\n")
        child.stdin.flush()
    ended = [child.communicate() for child in children]
    (trained, deleted) = [child.communicate()[0].split() for child in others]
    assert [errors[-300:] for _, errors in ended] == [""] * raters
    assert [child.returncode for child in children + others] == [0] * (raters + 2)
    acknowledged = [reply_id for said, _ in ended for reply_id in said.split()]
    with closing(Store(path)) as store:
        rated = [row[0] for row in store.db.rows("SELECT reply_id FROM ratings")]
        assert sorted(rated) == sorted(acknowledged) and len(rated) == raters * count
        assert "promoted" in trained and deleted and store.chats.ids() == {kept}
        # Each rating and each promoted base is a version.
        assert store.versions.head(tiny.fingerprint, "default") == raters * count + trained.count("promoted")
        assert store.witness.check().broken is None and disagreement(store) == ""
        assert store.search.find("question") == [] and store.search.find("words") != []
        assert store.integrity() == "ok"
