"""The C programs of neon/tests under sanitizers: addresses, undefined behaviour, leaks, threads."""

import pytest

from .c_programs import (
    ADDRESS,
    DECODER,
    KERNELS,
    MATRICES,
    THREAD,
    build_sanitized,
    compare,
    compiler,
    implementations,
)

HERE = "tests/kernels/test_c_sanitizers.py"
ONE = [pytest.param(name, marks=pytest.mark.full("neon", HERE)) for name in ("gcc", "clang")]


@pytest.mark.parametrize("name", ONE)
def test_all_implementations_agree_under_sanitizers(name, few):
    """The sanitizers find no access outside an array, no undefined behaviour and no leak."""
    assert compare(build_sanitized(KERNELS, compiler(name), ADDRESS), **few)[-1] == "scalar"


@pytest.mark.parametrize("program", MATRICES)
@pytest.mark.parametrize("name", ONE)
def test_no_access_outside_an_array_and_no_undefined_behaviour(name, program, few):
    assert compare(build_sanitized(program, compiler(name), ADDRESS), **few)[-1] == "scalar"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(ADDRESS, id="address", marks=pytest.mark.full("neon", HERE)),
        pytest.param(THREAD, id="thread", marks=pytest.mark.full("neon", HERE)),
    ],
)
def test_decoder_under_sanitizers(flags, few):
    """The sanitizers find no bad access, no undefined behaviour, no leak and no race between threads."""
    # TSan kills forked children that start threads, and makes every access twenty times as slow.
    less = {"RVM_NO_FORK": "1", "RVM_FEW": "1"} if flags is THREAD else few
    assert implementations(build_sanitized(DECODER, compiler("gcc", "clang"), flags), **less)[-1] == "scalar"
