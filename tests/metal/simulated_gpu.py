"""A GPU for machines without one: the kernels run in the C++ simulator, all else on MLX's CPU.

`SimulatedGPU(folder).install(monkeypatch)` takes the place of `ruvmlx.platform.gpu.gpu` in this process, and
in the child of the self-check. `broken` makes kernels fail as real ones do: {"append": "nan"}.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ruvmlx.backends.mlx import gpu_check
from ruvmlx.backends.mlx.check_results import GRAPH, Shapes
from ruvmlx.backends.mlx.kernels import selfcheck
from ruvmlx.backends.mlx.kernels.export import title
from ruvmlx.platform.gpu import GPU
from ruvmlx.platform.mx import mx

from .simulator import Simulated, compiler, to_mx, to_numpy

ROOT = Path(__file__).resolve().parents[2]
MODES = "raise", "wrong", "nan", "slow", "hang", "abort"
METAL_ERROR = (
    "[metal::Device] Unable to build metal library from source\n"
    "program_source:9:15: error: program scope variable must reside in constant address space"
)
PLAIN, OURS, SLOW = 1e-4, 5e-5, 1e-2  # seconds of a plain MLX call, of a kernel, and of a slow one
HANGS = "hangs"  # a file that says so


@dataclass
class SimulatedGPU:
    """folder: for the file HANGS. ran: names of the kernels that this process launched."""

    folder: Path
    broken: dict[str, str] = field(default_factory=dict)
    name: str = "Simulated M1"
    system: str = "simulator 1"
    ran: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        compiler()  # here, for a skip in the self-check's process would be a failure
        self._take_over(patch)
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {__name__} import child; child()"
        told = {"folder": str(self.folder), "broken": self.broken, "name": self.name, "system": self.system}
        patch.setattr(gpu_check, "COMMAND", [sys.executable, "-c", start, json.dumps(told)])

    def _take_over(self, patch: pytest.MonkeyPatch) -> None:
        for name, value in (("kind", "metal"), ("device", mx.Device(mx.cpu))):
            patch.setattr(
                GPU, name, property(lambda gpu, v=value: "" if gpu.given_up and v == "metal" else v)
            )
        for name in ("name", "system"):
            patch.setattr(GPU, name, property(lambda _, n=name: getattr(self, n)))
        patch.setattr(GPU, "run", lambda _, *arguments: self.run(*arguments))
        patch.setattr(GPU, "seconds", lambda _, make: self.seconds(make))
        patch.setattr(selfcheck, "RACES", 1)  # `seconds` is exact
        patch.setattr(selfcheck, "REPEATS", 1)
        if GRAPH in self.broken:
            patch.setattr(mx.fast, "rms_norm", lambda *_: self._fail(GRAPH))

    def run(self, kernel, inputs, shapes, groups, templates) -> list[mx.array]:
        self.ran.append(kernel.name)
        if self.broken.get(kernel.name) in ("raise", "hang", "abort"):
            self._fail(kernel.name)
        arrays = [to_numpy(x) for x in inputs]
        outputs = self._simulated(kernel, tuple(templates))(arrays, shapes, groups, templates)
        return [to_mx(self._spoilt(kernel.name, out)) for out in outputs]

    def seconds(self, make) -> float:
        """By what was launched, whatever the simulator took."""
        before = len(self.ran)
        mx.eval(*make())
        ran = self.ran[before:]
        return sum(SLOW if self.broken.get(name) == "slow" else OURS for name in ran) or PLAIN

    def _simulated(self, kernel, templates: tuple) -> Simulated:
        key = title(kernel, templates)
        if key not in _LOADED:
            _LOADED[key] = Simulated(kernel, [templates])
        return _LOADED[key]

    def _fail(self, name: str) -> None:
        how = self.broken[name]
        if how == "hang":
            (self.folder / HANGS).touch()
            time.sleep(600)
        if how == "abort":
            os.write(2, b"libc++abi: terminating due to uncaught exception: GPU Timeout Error\n")
            os.abort()
        raise RuntimeError(METAL_ERROR)

    def _spoilt(self, name: str, out: np.ndarray) -> np.ndarray:
        how, floats = self.broken.get(name), out.dtype not in (np.uint8, np.uint32)
        if how == "nan":
            return (
                np.full_like(out, np.nan) if floats else np.full_like(out.view(np.uint8), 255).view(out.dtype)
            )
        if how == "wrong":
            return out * out.dtype.type(1.1) if floats else _bits_off(out)
        return out


def _bits_off(out: np.ndarray) -> np.ndarray:
    """One in an eighth of the bytes."""
    spoilt = np.ascontiguousarray(out).copy()
    some = spoilt.reshape(-1).view(np.uint8)
    some[: some.size // 8] ^= 8
    return spoilt


_LOADED: dict[str, Simulated] = {}


def child() -> None:
    """The self-check's process: `python -c START SIMULATED SHAPES`."""
    told, shapes = (json.loads(text) for text in sys.argv[1:])
    with pytest.MonkeyPatch.context() as patch:
        SimulatedGPU(**told | {"folder": Path(told["folder"])})._take_over(patch)
        selfcheck.main(Shapes(**shapes))
