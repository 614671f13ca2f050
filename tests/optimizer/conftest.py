"""A tiny model on the native backend, whose speed a test chooses: a clock that only the model moves."""

from types import SimpleNamespace

import pytest

import ruvmlx.engine.drafts
import ruvmlx.engine.run
import ruvmlx.engine.source
import ruvmlx.optimizer.optimizer
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.optimizer.monitor import LoadWatch


@pytest.fixture(scope="session")
def tiny_backend(tiny):
    return NativeBackend(tiny, threads=1)


class SimulatedSpeed:
    """A model on a machine with `cores` cores. A decode step takes `seconds[threads]`; each guessed token of
    a check adds the share `slope` of it; a step of w replies takes as long as one up to `wide` replies, and
    in proportion above."""

    def __init__(self, cores: int = 4):
        self.now, self.cores, self.threads = 0.0, cores, cores
        self.seconds = {cores: 0.04}  # by the number of threads
        self.slope, self.wide = 1.0, 4
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def limit_threads(self, most: int) -> None:
        self.threads = most

    def spend(self, name: str, times: float) -> None:
        self.calls.append(name)
        self.now += times * self.seconds.get(self.threads, 0.05)


@pytest.fixture
def speed(tiny_backend, monkeypatch) -> SimulatedSpeed:
    found = SimulatedSpeed()
    timer = SimpleNamespace(perf_counter=found.clock)
    for module in (ruvmlx.engine.run, ruvmlx.engine.source):
        monkeypatch.setattr(module, "time", timer)
    monkeypatch.setattr(ruvmlx.engine.drafts, "perf_counter", found.clock)
    monkeypatch.setattr(ruvmlx.optimizer.optimizer, "SYSTEM_CLOCK", found.clock)
    monkeypatch.setattr(LoadWatch, "others", lambda self: 0.0)
    monkeypatch.setattr(tiny_backend, "threads", found.cores)
    monkeypatch.setattr(tiny_backend, "limit_threads", found.limit_threads)
    monkeypatch.setattr(tiny_backend.pool, "pressure", lambda: 0.1)
    times = {
        "decode": lambda token, *_: 1.0,
        "decode_drafted": lambda token, draft, *_: 1 + found.slope * len(draft),
        "decode_batch": lambda tokens, *_: max(1.0, len(tokens) / found.wide),
    }
    for name, cost in times.items():
        real = getattr(tiny_backend, name)

        def slow(*args, name=name, real=real, cost=cost):
            found.spend(name, cost(*args))
            return real(*args)

        monkeypatch.setattr(tiny_backend, name, slow)
    return found
