"""The threads of NumPy's matrix products."""

import numpy as np
import pytest

from ruvmlx.platform import cpu, numpy_blas
from ruvmlx.platform.numpy_blas import NumpyThreads, used_threads


@pytest.fixture(autouse=True)
def same_after(monkeypatch):
    """Other tests keep their threads."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    before = used_threads()
    yield
    if before:
        NumpyThreads(before).adapt()


def others(monkeypatch, busy, cores=8, ours=4):
    monkeypatch.setattr(cpu.OtherLoad, "cores", lambda self: busy)
    monkeypatch.setattr(numpy_blas.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(cpu, "physical_cores", lambda: ours)


@pytest.mark.parametrize(("busy", "count"), [(0.0, 4), (3.6, 4), (5.6, 2), (7.8, 1), (20.0, 1)])
def test_threads_leave_busy_cores_alone(monkeypatch, busy, count):
    others(monkeypatch, busy)
    assert NumpyThreads().adapt() == count


def test_a_chosen_number_stays(monkeypatch):
    """That of the setting, then that of the variable."""
    others(monkeypatch, 8.0)
    assert NumpyThreads(3).adapt() == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert NumpyThreads().adapt() == 2 and NumpyThreads(3).adapt() == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "all")
    assert NumpyThreads().adapt() == 1


def test_numpy_uses_that_many():
    if used_threads() is None:
        pytest.skip("NumPy has another library than OpenBLAS")
    x = np.ones((64, 64), np.float32)
    for count in (1, 2, 1):
        NumpyThreads(count).adapt()
        assert used_threads() == count and (x @ x == 64).all()


def test_a_learner_uses_one_thread(open_tiny):
    if used_threads() is None:
        pytest.skip("NumPy has another library than OpenBLAS")
    NumpyThreads(2).adapt()
    with open_tiny():
        assert used_threads() == 1
