"""MLX's matrix products really run on OpenBLAS, and what happens when they cannot."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from ruvmlx.platform import blas, cpu

PROBE = """
import json, os, sys
{before}
from ruvmlx.platform.mx import BLAS, mx
mx.set_default_device(mx.cpu)
a = mx.random.normal((520, 513))
mx.eval(a)
count = BLAS.calls()
b = a @ a.T
mx.eval(b)
maps = open("/proc/self/maps").read()
print(json.dumps({{
    "name": BLAS.name, "detail": BLAS.detail, "calls": BLAS.calls() - count, "threads": BLAS.threads(),
    "mapped": "libscipy_openblas.so" in maps, "trace": float(mx.trace(b)), "squares": float((a * a).sum()),
}}))
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="OpenBLAS is loaded on Linux only")
needs_shim = pytest.mark.skipif(
    sys.platform == "linux" and not blas.shim_path().is_file(),
    reason=f"the C library is not built: no {blas.shim_path()}",
)


def probe(before: str = "", **env: str) -> dict:
    """A matrix product in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(before=before)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@linux
@needs_shim
def test_mlx_is_bound_to_openblas():
    """One product of MLX is one call counted by the shim, and its value is right."""
    seen = probe()
    assert seen["name"].startswith("openblas 0.")
    assert seen["calls"] == 1
    assert seen["mapped"]
    assert seen["trace"] == pytest.approx(seen["squares"], rel=1e-4)


@linux
@needs_shim
def test_without_the_shim_no_product_is_counted():
    """Without the shim the same product is not counted, and no OpenBLAS of ours is in the process."""
    seen = probe(RUVMLX_BLAS_SHIM="off")
    assert (seen["name"], seen["calls"], seen["mapped"]) == ("reference", 0, False)
    assert seen["trace"] == pytest.approx(seen["squares"], rel=1e-4)


@linux
@needs_shim
def test_mlx_imported_first_keeps_its_own_blas_and_we_say_so():
    """MLX that was imported first is bound for good; we say so and do not pretend."""
    seen = probe(before="import mlx.core")
    assert seen["name"] == "reference"
    assert "too late" in seen["detail"]
    assert seen["calls"] == 0


@linux
def test_without_the_c_library_mlx_works_and_the_path_is_named(tmp_path):
    """No C library: MLX works on, slowly, and the reason names the path."""
    seen = probe(RUVMLX_BLAS_SHIM=str(tmp_path / "no.so"))
    assert seen["name"] == "reference"
    assert "no.so" in seen["detail"]


@linux
def test_not_a_library(tmp_path):
    (tmp_path / "bad.so").write_bytes(b"not an ELF file")
    seen = probe(RUVMLX_BLAS_SHIM=str(tmp_path / "bad.so"))
    assert seen["name"] == "reference"
    assert "cannot load" in seen["detail"]


@linux
@needs_shim
def test_blas_gets_one_thread_per_core_unless_told_otherwise():
    """One thread per core that is ours, unless OPENBLAS_NUM_THREADS says otherwise."""
    clean = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    if "OPENBLAS_NUM_THREADS" not in clean:
        assert probe(OPENBLAS_NUM_THREADS="1")["threads"] == 1
    assert 1 <= cpu.physical_cores() <= len(cpu.usable_cpus())


@linux
@needs_shim
def test_vectors_and_odd_shapes(tmp_path):
    """The one-row shortcut (sgemv) and the rest agree with NumPy, transposed or not, beta too."""
    if importlib.util.find_spec("ruvmlx") is None:
        pytest.fail("ruvmlx is not importable")
    from ruvmlx.platform.mx import mx

    rng = np.random.default_rng(3)
    for m, k, n in [(1, 7, 5), (1, 1, 9), (1, 64, 1), (2, 33, 17), (1, 577, 1031), (19, 1, 3)]:
        a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n), (m, n)))
        expected = a.astype(np.float64) @ b
        with mx.stream(mx.cpu):
            plain = mx.array(a) @ mx.array(b)
            right = mx.array(a) @ mx.array(np.ascontiguousarray(b.T)).T
            left = mx.array(np.ascontiguousarray(a.T)).T @ mx.array(b)
            added = mx.addmm(mx.array(c), mx.array(a), mx.array(b), alpha=0.5, beta=2.0)
            mx.eval(plain, right, left, added)
        for got in (plain, right, left):
            np.testing.assert_allclose(np.array(got), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.array(added), 0.5 * expected + 2 * c, rtol=1e-4, atol=1e-4)


@linux
@needs_shim
def test_uninitialised_output_is_not_read():
    """beta = 0 means "overwrite": a NaN left in the output's memory must not survive a one-row product."""
    import ctypes

    shim = blas.preload().shim or pytest.skip("MLX was imported before our door in this process")
    x, b, y = np.ones(8, np.float32), np.ones((5, 8), np.float32), np.full(5, np.nan, np.float32)
    pointer = ctypes.POINTER(ctypes.c_float)
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    args = [array.ctypes.data_as(pointer) for array in (x, b, y)]
    shim.cblas_sgemm(101, 111, 112, 1, 5, 8, one, args[0], 8, args[1], 8, zero, args[2], 5)
    assert y.tolist() == [8.0] * 5


@pytest.mark.skipif(sys.platform != "darwin", reason="macOS only")
def test_macos_needs_nothing():
    assert blas.preload().name == "accelerate"


class Counter:
    """A shim that remembers its threads."""

    n = 4

    def rvm_blas_get_threads(self):
        return self.n

    def rvm_blas_set_threads(self, n):
        self.n = n


def test_threads_leave_busy_cores_alone(monkeypatch):
    """As many threads as cores are free, at least one, never more than the most; a chosen number stays."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    openblas = blas.Blas("openblas", "", Counter(), most=4)
    seen = []
    for others in (0.0, 3.9, 5.4, 5.6, 7.6, 30.0, 0.2):
        openblas.adapt(others)
        seen.append(openblas.threads())
    assert seen == [4, 4, 3, 2, 1, 1, 4]
    openblas.set_threads(3)
    openblas.adapt(7.0)
    assert openblas.threads() == 3


def test_load_of_others(monkeypatch):
    """All busy time less our own, over the wall time; readings within a period are not repeated."""
    samples = iter([(0.0, 100.0, 5.0), (1.0, 103.5, 6.5)])
    clock = iter([0.1, 1.0, 1.1])
    monkeypatch.setattr(cpu.time, "monotonic", lambda: next(clock))
    load = cpu.OtherLoad(lambda: next(samples))
    assert [load.cores() for _ in range(3)] == [0.0, 2.0, 2.0]


@linux
def test_busy_seconds_counts_up():
    """The kernel's counter covers at least what this process burns."""
    busy, own = cpu._busy_seconds(), cpu.time.process_time()
    while cpu.time.process_time() < own + 0.15:
        pass
    assert cpu._busy_seconds() - busy > 0.1
