"""What a process holds."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.platform import memory
from ruvmlx.platform.memory import MemoryUse
from ruvmlx.text import size
from ruvmlx.training.trainer import Trainer

from ..test_runtime import say


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (2048, "2.0 kB"), (3 << 20, "3.1 MB"), (3 << 29, "1.6 GB")]
)
def test_sizes_are_read_and_shown(count, shown):
    assert size(count) == shown


GROW = """
import numpy as np
from ruvmlx.platform import memory
before = memory.resident()
block = np.ones(200 << 20, np.uint8)
held = memory.resident()
del block
print(before, held, memory.resident(), memory.peak())
"""


def test_what_is_held_now_and_at_most():
    """200 MiB come and go; the peak remembers them."""
    done = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, timeout=60)
    before, held, after, peak = (int(word) / 2**20 for word in done.stdout.split())
    assert 150 < held - before < 250 and held - after > 150 and peak > held - 8 and held > before > 5


@pytest.mark.parametrize("opened", [NativeBackend, MLXBackend])
def test_a_backend_knows_its_weights(starter, opened):
    """At least what the file has (nothing is in fewer bits), at most float32 with what it computes in."""
    backend = opened(starter)
    assert 0.9 * starter.bytes < backend.nbytes < 4.5 * starter.parameters + (64 << 20)


def test_the_parts_of_a_runtime(open_tiny):
    with open_tiny() as runtime:
        empty = runtime.memory_use()
        say(runtime, runtime.chats.new_chat(), "hello")
        held = runtime.memory_use()
        learner = runtime.learner
        assert held.model == runtime.backend.nbytes > 0
        assert held.adapters == learner.active.nbytes + learner.traces.nbytes > learner.traces.nbytes > 0
        assert empty.kv == 0 < held.kv == runtime.engine.sessions.nbytes
        assert held.resident <= held.peak and held.resident < held.budget
        assert held.model + held.kv + held.adapters + held.rest == held.resident


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator alone has it")
def test_a_closed_trainer_gives_the_freed_memory_back(open_tiny):
    """The allocator keeps 96 MiB of freed blocks, because a block in use lies after them."""
    with open_tiny() as runtime:
        trainer = Trainer(runtime.model, "cpu")
        *blocks, last = [bytearray(64 << 10) for _ in range(1536)]
        del blocks
        before = memory.resident()
        trainer.close()
        assert before - memory.resident() > 80 << 20 and last


def test_parts_that_are_not_in_memory_now_leave_no_rest():
    """A model may be larger than what is resident of it."""
    assert MemoryUse(100, 10, 1, 50, 60, 1000).rest == 0


def test_a_system_without_proc(monkeypatch):
    monkeypatch.setattr(memory, "_STATUS", "/nowhere")
    np.ones(1)
    assert memory._status("VmRSS") == memory._maxrss() > 1 << 20
