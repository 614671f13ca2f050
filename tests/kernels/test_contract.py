"""What the wrappers and the library refuse, and how they say it."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from ruvmlx.kernels import library, micro

F = np.float32


def zeros(*shape):
    return np.zeros(shape, F)


@pytest.mark.parametrize(
    "call,expected",
    [
        (lambda: micro.head_add(zeros(2, 9), zeros(2, 4), zeros(5, 1), zeros(1, 9), 1), "hidden has shape"),
        (lambda: micro.head_add(zeros(2, 8), zeros(2, 5), zeros(5, 1), zeros(1, 9), 1), "logits has shape"),
        (lambda: micro.head_add(zeros(9), zeros(5), zeros(5, 2), zeros(1, 9), 1), "lora_b has shape"),
        (lambda: micro.head_add(zeros(9), zeros(5), zeros(5, 65), zeros(65, 9), 1), "rank is 65"),
        (lambda: micro.micro_update(zeros(3), None, zeros(4), 1.0), "grad has shape"),
        (lambda: micro.micro_update(np.zeros(3), None, np.zeros(3), 1.0), "float64, expected float32"),
        (lambda: micro.micro_update(zeros(6)[::2], None, zeros(3), 1.0), "not contiguous"),
        (lambda: micro.micro_update(zeros(0), None, zeros(0), 1.0), "empty"),
        (lambda: micro.logprobs(zeros(2, 3), np.int32([0, 3])), "outside the vocabulary of 3"),
        (lambda: micro.logprobs(zeros(2, 3), np.int64([0, 1])), "int64, expected int32"),
        (lambda: micro.logprobs(zeros(2, 3), np.int32([0, -1])), "outside the vocabulary of 3"),
    ],
)
def test_wrong_arrays_are_named(call, expected):
    with pytest.raises(ValueError, match=expected):
        call()


def test_a_token_outside_the_vocabulary_is_refused():
    a, b = zeros(2, 1), zeros(1, 3)
    for y in (-1, 3):
        with pytest.raises(ValueError, match=f"token y = {y}"):
            micro.trace_accumulate(zeros(2), zeros(3), y, a, b, 1.0, a.copy(), b.copy())


def test_read_only_arrays_can_be_read_but_not_written():
    """mmapped weights are read-only; a kernel must not write through them."""
    x = np.arange(5, dtype=F)
    x.flags.writeable = False
    assert micro.all_within(x, 4)
    with pytest.raises(ValueError, match="read-only"):
        micro.micro_update(x, None, x.copy(), 1.0)


@pytest.mark.parametrize("impl", library.implementations())
def test_the_c_functions_check_their_own_arguments(impl):
    """Callers from C have no wrapper: null pointers, size 0, rank 65 and ids out of range return 1."""
    f, x = library.functions(impl), zeros(100)
    p, out = x.ctypes.data, ctypes.addressof((ctypes.c_double * 2)())
    ids = np.int32([3]).ctypes.data
    assert (
        f.dot(p, p, 4, None) == f.all_within(None, 1, 1.0) == f.all_within(p, 0, 1.0) == library.BAD_ARGUMENT
    )
    assert f.micro_update(None, 1, 1.0, 0.0) == library.BAD_ARGUMENT
    assert f.head_add(p, p, p, 1.0, 1, 1, 1, 65, p) == library.BAD_ARGUMENT
    assert f.trace_accumulate(p, p, p, p, 1.0, 1, 3, 1, 3, p, p, out) == library.BAD_ARGUMENT
    assert f.kl_to_frozen(p, None, p, p, 1.0, 1, 1, 0, out) == library.BAD_ARGUMENT
    assert f.logprobs(p, ids, 1, 3, out) == library.BAD_ARGUMENT
    assert f.micro_place(p, 1.0, p, ids, 1.0, 1, 3, 1, 1, 1.0, p) == library.BAD_ARGUMENT


def test_registry_names_the_fastest_implementation_of_every_kernel():
    assert set(library.registry()) == set(library.KERNELS)
    assert set(library.registry().values()) == {library.implementations()[0]}
    assert library.implementations()[-1] == "scalar"


def test_an_unknown_implementation_is_named():
    with pytest.raises(library.LibraryError, match=r"'mmx'.*scalar"):
        library.functions("mmx")
    with pytest.raises(KeyError, match="no kernel 'gemm'"):
        library.available("gemm")


def run(*lines):
    """A fresh interpreter: the library is loaded once per process."""
    code = "import ruvmlx.kernels.library as lib\n" + "\n".join(lines)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_missing_library_says_how_to_build_it():
    done = run("lib._folders = lambda: []", "lib.functions()")
    assert "librvm" in done.stderr.splitlines()[-1]
    assert "uv sync --reinstall-package ruvmlx" in done.stderr.splitlines()[-1]


def test_a_library_of_another_version_says_so():
    done = run("lib.ABI_VERSION = 99", "lib.functions()")
    assert "has ABI version" in done.stderr.splitlines()[-1]
    assert "need 99" in done.stderr.splitlines()[-1]


def test_a_damaged_library_says_so(tmp_path):
    (tmp_path / library.find("rvm").name).write_bytes(b"not a library")
    done = run(f"import pathlib; lib._folders = lambda: [pathlib.Path({str(tmp_path)!r})]", "lib.functions()")
    assert "reinstall ruvmlx on this machine" in done.stderr.splitlines()[-1]
