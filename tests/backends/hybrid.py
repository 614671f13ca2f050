"""Two sides of the hybrid backend for tests: side backends that fail, and a clock that only tests move."""

from types import SimpleNamespace

from ruvmlx.backends.hybrid.backend import HybridBackend
from ruvmlx.backends.hybrid.placement import Placement
from ruvmlx.backends.hybrid.side import DECODE, HEAD, READ, Side
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend

METHODS = [f"decode{more}" for more in ("", "_batch", "_drafted")]
METHODS += ["prefill", "hidden_states", "head", "read", "take_hidden"]


class Failing:
    """A backend that fails for ever after `calls` calls of the methods `of`, in its token streams too. calls
    = None: never. hooks: {method: a function that is called first}"""

    def __init__(self, backend, calls=None, of=METHODS):
        vars(self).update(backend=backend, left=calls, of=of, seen=[], hooks={})

    def __getattr__(self, name):
        value = getattr(self.backend, name)
        if name == "stream":
            return lambda *args: FailingStream(self, value(*args))
        return self.count(name, value) if name in METHODS else value

    def __setattr__(self, name, value):
        setattr(self.backend, name, value)

    def count(self, name, call):
        def call_and_count(*args, **kwargs):
            self.seen.append(name)
            if self.left is not None and (name in self.of or self.left < 0):
                vars(self)["left"] = self.left - 1
                if self.left < 0:
                    raise RuntimeError("the device is gone")
            self.hooks.get(name, lambda: None)()
            return call(*args, **kwargs)

        return call_and_count


class FailingStream:
    def __init__(self, owner, stream):
        self._owner, self._stream = owner, stream

    def __getattr__(self, name):
        value = getattr(self._stream, name)
        return self._owner.count(name, value) if name in METHODS else value


def open_side(name, model):
    return NativeBackend(model, threads=1) if name == "native" else MLXBackend(model, device="cpu")


def join(main, other, are_apart=True, costs=(1.0, 1e-9)) -> HybridBackend:
    """Return a hybrid backend with chosen costs in place of measured ones. By these costs, the other side
    does all work that is no reply."""
    sides = Side(main), Side(other)
    for side, cost in zip(sides, costs, strict=True):
        side.costs.update(dict.fromkeys((READ, DECODE, HEAD), cost))
    return HybridBackend(Placement(*sides, are_apart))


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def slow(backend, clock, **seconds):
    """Return a backend whose methods take so many seconds of the clock."""

    def wrap(name):
        def taking(*args, **kwargs):
            clock.now += seconds[name]
            return getattr(backend, name)(*args, **kwargs)

        return taking

    return SlowBackend(backend, {name: wrap(name) for name in seconds})


class SlowBackend(SimpleNamespace):
    def __init__(self, backend, calls):
        super().__init__(backend=backend, **calls)

    def __getattr__(self, name):
        return getattr(self.backend, name)
