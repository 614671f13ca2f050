"""kill -9 during training, saving and promotion: no rating is lost, and the store always loads."""

import os
import random
import signal
import subprocess
import sys
import time

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

TRAIN_FOREVER = """
import sys
from ruvmlx.settings import Settings, store_file
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.sona import background, promotion
from ruvmlx.store import Store
background.SAVE_EVERY, promotion.objection = 1, lambda *a: ""  # every base is promoted
model = load_model(sys.argv[1])
chosen = Settings(kv_disk=None)
runtime = Runtime(Store(store_file()), model, NativeBackend(model, threads=1), chosen)
for i in range(runtime.status().ratings, 12):
    request = GenerationRequest(
        request_id=f"reply-{i}",  # decides what is held out: the same in every run
        prompt="question", max_new_tokens=9, sampling=Sampling(seed=i % 2), ignore_eos=True,
    )
    list(runtime.writer.generate(request))
    runtime.learning.settle()
    runtime.rate("last", "up" if i % 2 else "down")
settings = background.TrainingSettings(steps=3, lr=4e-3, warmup=1, rank=3)
while True:
    print("run", flush=True)
    runtime.learning.consolidate(lambda *a: print("step", flush=True), None, settings)
"""


def test_training_survives_kill_9(tiny_folder, home, whole_text):
    rng, model = random.Random(0), load_model(str(tiny_folder))
    backend, promotions, found = NativeBackend(model, threads=1), 0, set()
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", TRAIN_FOREVER, str(tiny_folder)],
            env={**os.environ, "RUVMLX_HOME": str(home)},
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = rng.randrange(2, 7)
        for _ in range(lines):
            assert child.stdout.readline().strip() in ("run", "step")
        time.sleep(rng.random() * 0.2 * (lines > 3))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        with Runtime(Store(home / "ruvmlx.db"), model, backend, Settings(kv_disk=None)) as runtime:
            status, learner = runtime.status(), runtime.learner
            assert status.ratings == 12 and runtime.store.integrity() == "ok"
            assert status.consolidations >= promotions
            promotions = status.consolidations
            found |= {learner.history.training() is not None, "base" if promotions else "none"}
            assert (learner.base is None) == (promotions == 0)
            assert status.adapter_version == 12 + promotions
            assert learner.probe.kl(learner.micro) <= status.kl_cap + 1e-4
    assert {True, "base"} <= found  # killed in the middle of a training, and after a promotion
