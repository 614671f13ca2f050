"""kill -9 during many ratings: no acknowledged rating is lost, and the adapter always loads."""

import os
import random
import signal
import subprocess
import sys
import time

from ruvmlx.models.load import load_model
from ruvmlx.sona.adapter_history import AdapterHistory
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement

RATE_FOREVER = """
import sys
from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.store import Store
from ruvmlx.settings import Settings, store_file
model = load_model(sys.argv[1])
settings = Settings(kv_disk=None)
runtime = Runtime(Store(store_file()), model, open_backend("reference", model), settings)
for i in range(10_000):
    request = GenerationRequest(prompt="hi", max_new_tokens=3, sampling=Sampling(seed=i), ignore_eos=True)
    list(runtime.writer.generate(request))
    runtime.learning.settle()
    result = runtime.rate("last", "up" if i % 3 else "down")
    print(result.adapter_version, flush=True)
"""


def test_acknowledged_ratings_survive_kill_9(tiny_folder, home):
    rng = random.Random(0)
    acknowledged, model = 0, load_model(str(tiny_folder))
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", RATE_FOREVER, str(tiny_folder)],
            env={**os.environ, "RUVMLX_HOME": str(home)},
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = [child.stdout.readline() for _ in range(3)]
        time.sleep(rng.random() * 0.3)
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines()
        child.wait()
        last = int([line for line in lines if line.strip()][-1])
        store = Store(home / "ruvmlx.db")
        assert store.witness.check().broken is None and disagreement(store) == ""
        history = AdapterHistory(store, model.fingerprint)
        status = history.status()
        assert acknowledged < last <= status.adapter_version <= last + 1
        assert status.ratings == status.adapter_version
        assert history.adapter(status.adapter_version).state
        acknowledged = status.adapter_version
