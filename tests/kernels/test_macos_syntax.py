"""Every C and C++ source that a Mac compiles, read by clang with Apple's headers (PyPI ziglang): no error, no
warning. The library itself, its tests and tools, and the simulator of the GPU kernels."""

import os
import re
import subprocess
import sys
import tempfile

import pytest

from ruvmlx.backends.mlx.kernels.source import folder
from tests.metal import simulator
from tests.metal.kernels import KERNELS

from .c_programs import NEON

X86 = {"matrix_amx", "matrix_avx2", "matrix_avx512", "matrix_avx512vnni", "matrix_avxvnni"}
LINUX = {"blas_shim"}  # a Mac has Accelerate
FEATURES = {"matrix_neon_dotprod": "generic+dotprod", "matrix_neon_i8mm": "generic+dotprod+i8mm"}
# As neon/CMakeLists.txt defines them there.
DEFINED = (
    "-DRVM_IMPL=neon",
    *("-DRVM_HAVE_SCALAR", "-DRVM_HAVE_NEON"),
    *(f"-DRVM_HAVE_MATMUL_{name}" for name in ("SCALAR", "NEON", "NEON_DOTPROD", "NEON_I8MM")),
)
C_FILES = sorted(
    file
    for part in ("src", "tests", "tools")
    for file in (NEON / part).glob("*.c")
    if file.stem not in X86 | LINUX
)


# Not in the user's folder, where one zig waits for another.
CACHE = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(NEON.parent / "build/zig-cache"))
# Zig looks for the object that -fsyntax-only does not make.
NO_OBJECT = re.compile(r"^.*error: failed to rename '.*' into '.*': FileNotFound\n+", re.MULTILINE)


def errors(driver: str, *words: object) -> str:
    """What clang for arm64 macOS says of a file."""
    pytest.importorskip("ziglang", reason="PyPI ziglang is not installed (uv sync --group cross)")
    strict = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-command-line-argument"]
    only = ["-target", "aarch64-macos", "-c", "-fsyntax-only"]  # -c: nothing is linked
    command = [sys.executable, "-m", "ziglang", driver, *only, *strict, *map(str, words)]
    with tempfile.TemporaryDirectory() as here:  # zig leaves an empty file there
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | CACHE, cwd=here, check=False
        )
    looked_for, said = NO_OBJECT.search(done.stderr), NO_OBJECT.sub("", done.stderr)
    return said or f"ended with {done.returncode}" * (done.returncode != 0 and not looked_for)


def c_errors(*words: object) -> str:
    return errors("cc", "-std=c11", "-I", NEON / "include", *DEFINED, *words)


def cxx_errors(*words: object) -> str:
    flags = [flag for flag in simulator.FLAGS if flag not in ("-shared", "-O1")]
    return errors("c++", *flags, "-I", folder(), *words)


@pytest.mark.parametrize("file", C_FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_c(file):
    assert c_errors("-mcpu=" + FEATURES.get(file.stem, "generic"), file) == ""


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_simulator_s_kernels(kernel, tmp_path):
    """One set of template values: the others differ in numbers alone."""
    program = tmp_path / "kernel.cpp"
    program.write_text(simulator.program(kernel, simulator.body_lines(kernel), KERNELS[kernel][:1]))
    assert cxx_errors("-Wno-unused-function", program) == ""


def test_the_simulator_s_probe(tmp_path):
    program = tmp_path / "contexts.cpp"
    program.write_text(simulator.CONTEXTS)
    assert cxx_errors("-Wno-deprecated-declarations", program) == ""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("#include <pthread.h>\npthread_barrier_t barrier;\n", "pthread_barrier_t"),
        ("#define _POSIX_C_SOURCE 200809L\n#include <ucontext.h>\n", "deprecated"),
        ("#include <sys/epoll.h>\n", "not found"),
    ],
)
def test_what_a_mac_lacks_is_found(tmp_path, source, said):
    file = tmp_path / "wrong.c"
    file.write_text(source)
    assert said in c_errors(file)
