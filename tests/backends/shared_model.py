"""This module runs a model over several processes, for tests. It starts the ranks above 0. Its scenarios give
results that must be equal in one process and in several processes.

The test process is rank 0 of two. Three ranks need a process of their own, because MLX keeps one connection
in a process: `python -m tests.backends.shared_model FOLDER` runs the same scenarios there.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from apps.cli.launch import _free_ports, _start_values, drop_library_lines
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.sharded import cluster, place
from ruvmlx.engine import GenerationRequest
from ruvmlx.errors import RuvmlxError
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.lora.base_lora import MODULES, BaseLoRA, place_shape
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.models.config.model import Model
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from tests.test_runtime import say

SMALL = TierPolicy("tiered", (64, 128))  # pages of all tiers after few tokens
PROMPT = [int(t) for t in np.random.default_rng(7).integers(0, 320, 230)]
WAIT = 60.0  # seconds; only a process that hangs takes so long


@contextlib.contextmanager
def ranks(n: int, **changes: str) -> Iterator[list[subprocess.Popen]]:
    """Start the ranks above 0; in the block, the environment says that this process is rank 0. changes: other
    values of the environment of the ranks above 0."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(n)]))
        env = _start_values("127.0.0.1", n, "ring") | {"MLX_HOSTFILE": str(hosts), "RUVMLX_THREADS": "1"}
        started = [follower(env | {"MLX_RANK": str(rank)} | changes) for rank in range(1, n)]
        for name, value in (env | {"MLX_RANK": "0"}).items():
            patched.setenv(name, value)
        try:
            yield started
        finally:
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0 if changes else 10)
                process.kill()
                process.communicate()


def follower(env: dict[str, str]) -> subprocess.Popen:
    words = [sys.executable, "-m", "ruvmlx", "launch", "--as-rank", "--", "chat"]
    return subprocess.Popen(words, env=os.environ | env, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def joined_ranks(n: int) -> Iterator[None]:
    """Connect all ranks. In the block, `over_ranks` lets this process be rank 0."""
    with ranks(n), pytest.MonkeyPatch.context() as patched:
        peers = cluster.join_ranks()
        patched.delenv(place.RANKS)
        try:
            yield
        finally:
            peers.close()


@contextlib.contextmanager
def over_ranks(n: int = 2) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(place.RANKS, str(n))
        yield


def no_machine(model: Model, layers: int) -> None:
    """Say that no machine has room for the model, so that the forecast measures all ranks alone."""


class Pair:
    """A model over all ranks, and the same model in this process alone."""

    def __init__(self, folder: Path, n: int = 2):
        self.model = load_model(str(folder))
        with over_ranks(n):
            self.many = cluster.open_leader(self.model, 1, no_machine)
        self.one = MLXBackend(self.model, device="cpu")

    @property
    def both(self):
        return self.many, self.one


def greedy(backend, policy=None, adapter=None, prompt=PROMPT, n=12) -> tuple[list[int], np.ndarray]:
    """Return the most likely tokens after the prompt, and the logits before the last of them."""
    cache = backend.new_cache(policy)
    step = backend.prefill(prompt, cache, adapter)
    return go_on(backend, cache, step.logits, n, adapter)


def go_on(backend, cache, logits, n=12, adapter=None):
    tokens = [int(logits.argmax())]
    while len(tokens) < n:
        logits = backend.decode(tokens[-1], cache, adapter).logits
        tokens.append(int(logits.argmax()))
    return tokens, logits


def assert_same(pair: Pair, run) -> None:
    """`run` gives the same tokens, and nearly the same logits, over all ranks and alone."""
    (many, logits), (one, wanted) = map(run, pair.both)
    assert many == one
    np.testing.assert_allclose(logits, wanted, atol=2e-3 * np.abs(wanted).max())


def random_micro(model) -> MicroLoRA:
    rng, config = np.random.default_rng(5), model.config
    a = rng.standard_normal((config.hidden_size, 2)).astype(np.float32)
    return MicroLoRA(a, rng.standard_normal((2, config.vocab_size)).astype(np.float32))


def random_base(model, packed: bool = False) -> BaseLoRA:
    """A base LoRA that changes all linear layers and the embedding."""
    rng, pairs = np.random.default_rng(3), {}
    for module in MODULES:
        for layer in range(1 if module in ("lm_head", "embed_tokens") else model.config.n_layers):
            n_in, n_out = place_shape(model.config, module, layer)
            a, b = rng.standard_normal((n_in, 2)), rng.standard_normal((2, n_out))
            pairs[module, layer] = a.astype(np.float32), b.astype(np.float32)
    made = BaseLoRA(pairs, 0.05)
    return made.to_4_bits() if packed else made


def check_all(folder: Path) -> None:
    """The scenarios of three ranks."""
    pair = Pair(folder, 3)
    for policy in (None, SMALL):
        assert_same(
            pair, lambda backend, policy=policy: greedy(backend, policy, random_micro(pair.model), n=4)
        )
    base = random_base(pair.model)
    for backend in pair.both:
        backend.set_lora(base)
    assert_same(pair, lambda backend: greedy(backend, SMALL, n=4))


def ask_for_ever(folder: str) -> None:
    """Open a runtime as rank 0 and write replies until an error. Say when the first prompt is being read."""
    settings = Settings(model=folder, kv_disk=10)
    with Runtime.open(settings) as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello", n=2)
        for i in itertools.count():
            request = GenerationRequest(prompt=f"{i} " + "hello " * 200, max_new_tokens=9)
            for _ in runtime.writer.generate(request):
                if not i:
                    print("reading", flush=True)


def start_asking(folder: Path) -> subprocess.Popen:
    """Start `ask_for_ever` in a process of its own, inside of `ranks`."""
    words = [sys.executable, "-m", "tests.backends.shared_model", "ask", str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__" and sys.argv[1] == "ask":
    drop_library_lines()
    try:
        ask_for_ever(sys.argv[2])
    except RuvmlxError as error:
        sys.exit(f"ruvmlx: {error}")
elif __name__ == "__main__":
    with joined_ranks(3):
        check_all(Path(sys.argv[1]))
    print("the same")
