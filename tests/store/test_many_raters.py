"""Many processes rate replies of one adapter at the same time: none is refused, none is lost or doubled."""

import os
import subprocess
import sys
from contextlib import closing

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model
from ruvmlx.sona.wiring import open_learner
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement

# Writes its own replies, waits for a line, rates them all, and prints what was acknowledged.
RATER = """
import sys
from ruvmlx.settings import Settings, store_file
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.store import Store

model, seed, count = load_model(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with Runtime(Store(store_file()), model, NativeBackend(model, threads=1), Settings(kv_disk=None)) as runtime:
    ids = []
    for i in range(count):
        request = GenerationRequest(
            prompt="question", max_new_tokens=5, sampling=Sampling(seed=1000 * seed + i), ignore_eos=True
        )
        list(runtime.generate(request))
        ids.append(request.request_id)
    runtime.settle()
    print("ready", flush=True)
    sys.stdin.readline()
    for i, reply_id in enumerate(ids):
        runtime.rate(reply_id, "up" if i % 3 else "down")
        print(reply_id, flush=True)
"""


def test_many_processes_rate_at_the_same_time(home, tiny_folder, tiny_whitening, whole_text, full):
    raters, count = (12, 40) if full else (4, 12)
    tiny, path = load_model(str(tiny_folder)), home / "ruvmlx.db"
    with closing(Store(path)) as store:
        store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        open_learner(store, tiny, NativeBackend(tiny, threads=1), "default")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RATER, str(tiny_folder), str(seed), str(count)],
            env={**os.environ, "RUVMLX_HOME": str(home)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for seed in range(raters)
    ]  # fmt: skip
    assert [child.stdout.readline() for child in children] == ["ready\n"] * raters
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    ended = [child.communicate() for child in children]
    assert [errors[-300:] for _, errors in ended] == [""] * raters
    acknowledged = [reply_id for said, _ in ended for reply_id in said.split()]
    with closing(Store(path)) as store:
        rated = [row[0] for row in store.db.rows("SELECT reply_id FROM ratings")]
        assert sorted(rated) == sorted(acknowledged) and len(rated) == raters * count
        assert store.versions.head(tiny.fingerprint, "default") == raters * count
        assert store.witness.check().broken is None and disagreement(store) == ""
