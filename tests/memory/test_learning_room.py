"""Training takes the memory that is left, and no more."""

# ruff: noqa: F811 - the fixtures of training_runs.py are parameters here

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.errors import RuvmlxError
from ruvmlx.lora import residency
from ruvmlx.memory import learning_room
from ruvmlx.memory.learning_room import LearningRoom, training_bytes
from ruvmlx.memory.load_plan import NotEnoughMemory
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.platform import cpu
from ruvmlx.platform.memory import resident
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import background, promotion

from ..cli.verbs import run  # noqa: F401 - a fixture
from ..sona.training_runs import (  # noqa: F401 - fixtures
    QUICK,
    consolidate,
    rated_runtime,
    steady,
)

# What a training of the starter takes, by MLX's own count, in a process of its own.
MEASURE = """
import sys, mlx.core as mx, numpy as np
from ruvmlx.lora.base_lora import BaseLoRA, place_shape
from ruvmlx.memory.learning_room import training_bytes
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.models.load import load_model
from ruvmlx.training.slices import TrainingText
from ruvmlx.training.trainer import Trainer
model, rng, length = load_model(None), np.random.default_rng(0), int(sys.argv[1])
places = [(m, l) for m in ("q_proj", "k_proj", "v_proj", "o_proj") for l in range(model.shape.n_layers)]
shapes = {place: place_shape(model.config, *place) for place in places}
pairs = {p: (np.ones((i, 8), np.float32), np.zeros((8, o), np.float32)) for p, (i, o) in shapes.items()}
trainer = Trainer(model)
trainer.set_head(None, None)
trainer.reply(BaseLoRA(pairs, 2.0), TrainingText(tuple(range(100, 100 + length)), length // 2))
print(mx.get_peak_memory(), training_bytes(Facts.of(model), False, tokens=length))
"""


@pytest.mark.full("ruvmlx/training", "ruvmlx/memory")
def test_the_estimate_covers_what_a_training_takes(starter_file):
    """And it is at most a quarter more."""
    tokens = 48  # 160 take 40 s of processor time here
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tokens)], capture_output=True, text=True, check=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    peak, estimate = map(int, done.stdout.split())
    assert peak < estimate + (64 << 20) and estimate < 1.25 * peak


def test_a_backend_that_lends_its_graph_needs_no_second_copy(tiny):
    facts = Facts.of(tiny)
    assert training_bytes(facts, False) - training_bytes(facts, True) == 4 * facts.parameters


def test_a_training_without_room_does_not_begin(rated_runtime, monkeypatch):
    """The report has both numbers, and the work is not due again at once."""
    monkeypatch.setattr(background, "Trainer", None)  # a call would be a TypeError
    rated_runtime.learner.room = room_within(rated_runtime, resident() + (1 << 20))
    report, losses = consolidate(rated_runtime)
    assert not report["promoted"] and not losses
    assert report["reason"].startswith("training needs about ") and "memory_limit is" in report["reason"]
    assert rated_runtime.status().adapter_version == 14
    monkeypatch.setattr(rated_runtime.learning.loops, "missing", lambda: 0)
    assert not rated_runtime.learning.is_due()
    rated_runtime.learner.room.next_try = 0
    assert rated_runtime.learning.is_due()


def room_within(runtime, limit: int) -> LearningRoom:
    return LearningRoom(runtime.model, runtime.backend, limit)


@pytest.mark.parametrize("squeeze", ["machine", "limit"])
def test_a_squeeze_while_training_stops_it_and_frees_its_graph(rated_runtime, monkeypatch, squeeze):
    """The run goes on when there is room again, and ends with the same weights."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    monkeypatch.setattr(learning_room, "LOOK_EVERY", 0.0)
    want, _ = consolidate(rated_runtime)
    assert want["promoted"], want["reason"]
    base = rated_runtime.learner.base.to_bytes()
    rated_runtime.rollback(14)
    rated_runtime.learner.sync()
    looks = []

    def shrinking(before: int, after: int) -> int:
        looks.append(1)
        return before if len(looks) < 60 else after

    total = cpu.total_memory()
    with monkeypatch.context() as squeezed:
        if squeeze == "machine":
            squeezed.setattr(cpu, "available_memory", lambda: shrinking(total // 2, total // 64))
        else:
            rated_runtime.learner.room = room_within(rated_runtime, 64 << 30)
            squeezed.setattr(learning_room, "resident", lambda: shrinking(1 << 30, 65 << 30))
        report, _ = consolidate(rated_runtime)
    assert not report["promoted"] and report["reason"].startswith("training stopped: ") and looks
    loop = rated_runtime.learning.loops.background(QUICK)
    assert loop._trainer is None and rated_runtime.learner.history.training() is not None
    assert rated_runtime.status().adapter_version == 14 and rated_runtime.backend.lora is None
    again, _ = consolidate(rated_runtime)
    assert again["promoted"] and rated_runtime.learner.base.to_bytes() == base


def test_a_limit_of_4_mib_is_refused_with_numbers(home, starter_file, run):
    with pytest.raises(NotEnoughMemory, match=r"needs about \d.*there is room for 4\.2 MB \(memory_limit is"):
        Runtime.open(Settings(memory_limit=4))
    status, _, error = run("config", "set", "memory_limit", "4MB")
    status, _, error = run("generate", "hello")
    assert status and error.startswith("ruvmlx: SmolLM2-135M-Instruct.Q4_1 needs about ")
    assert "raise memory_limit" in error and error.count("\n") == 1


def test_everything_fits_into_the_limit_that_the_user_sets(home, starter_file):
    """The KV caches get what is left of it, and learning the rest of that."""
    limit = resident() + (600 << 20)
    with Runtime.open(Settings(memory_limit=limit >> 20, kv_disk=None)) as runtime:
        rows = {row.name: row for row in runtime.memory_purposes()}
        assert rows["total"].planned <= rows["total"].limit <= limit
        assert rows["adapters_hot"].limit == min(residency.BUDGET, rows["total"].limit // 8)
        fixed = rows["weights"].planned + rows["scratch"].planned + rows["learning"].planned
        assert rows["kv"].limit + fixed <= limit
        assert 0 < rows["learning"].limit <= limit and rows["scratch"].limit == rows["scratch"].planned
        report = runtime.learning.room
        assert report.need > report.bytes_left  # a second copy of the weights in float32 has no room
    assert json.dumps(rows["learning"].used) and np.isfinite(rows["learning"].used)
    with pytest.raises(RuvmlxError):
        replace(Settings(), memory_limit=0)
