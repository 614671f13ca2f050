"""The C library and its test programs, compiled from source: a build for each set of options (builds.py)."""

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ..builds import build_folder, built_file, contents

NEON = Path(__file__).parents[2] / "neon"
KERNELS = "rvm_compare"
MATRICES = ("rvm_compare_matmul", "rvm_compare_pages")
DECODER = "rvm_decoder_test"
ADDRESS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
THREAD = "-fsanitize=thread -fno-sanitize-recover=all"
# With -O3 a sanitizer makes the matrix kernels compile for minutes, and gcc's for addresses with -O1, too.
_QUICKLY = {ADDRESS: "-DRVM_MATRIX_O=-O0", THREAD: "-DRVM_MATRIX_O=-O1"}
# Clang warns of loops that it does not unroll or vectorise as asked: each clang without optimisation, old
# ones for ARM. That of macOS does all of them (test_c_compilers.py).
_LOOPS_MAY_STAY = "-Wno-pass-failed"


def tool(name):
    """A tool from the PATH or from the environment that runs the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return shutil.which(name, path=path)


def compiler(*names):
    found = next((path for name in names if (path := tool(name))), None)
    return found or pytest.skip(f"no C compiler: {' or '.join(names)}")


def build(program, cc, *options):
    """Compile a program of neon/tests with this compiler; returns it."""
    cmake = tool("cmake") or pytest.skip("no cmake")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"] if tool("ninja") else []
    flags = ["-DRVM_TESTS=ON", f"-DCMAKE_C_COMPILER={cc}", *generator, *options]
    # A warning is an error: an object with one would be taken by the next run, which compiles it no more.
    flags.append("-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    with build_folder("c", version(cc), *flags) as folder:
        _run(cmake, "-S", NEON, "-B", folder, *flags)
        _run(cmake, "--build", folder, "--target", program)
        return folder / program


def build_sanitized(program, cc, flags):
    """The same under a sanitizer; skips where the compiler came without its run-time library."""
    if not _has(cc, flags):
        pytest.skip(f"no {flags.split()[0]} for {Path(cc).name} here")
    return build(program, cc, f"-DCMAKE_C_FLAGS={flags} {_LOOPS_MAY_STAY}", _QUICKLY[flags])


def for_arm(program, name):
    """qemu for 64-bit ARM, and the program. name: of the compiler."""
    qemu = tool("qemu-aarch64") or tool("qemu-aarch64-static") or pytest.skip("no qemu-user")
    options = [
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    ]
    gcc = compiler("aarch64-linux-gnu-gcc")  # clang takes its C library
    if name == "gcc":
        return qemu, build(program, gcc, *options)
    target = "-DCMAKE_C_COMPILER_TARGET=aarch64-linux-gnu"
    return qemu, build(program, compiler(name), *options, target, f"-DCMAKE_C_FLAGS={_LOOPS_MAY_STAY}")


def for_apple_silicon(source, cpu, *flags):
    """neon/src/SOURCE.c as clang for arm64 macOS compiles it (PyPI ziglang has the headers): assembly."""
    pytest.importorskip("ziglang", reason="PyPI ziglang is not installed")
    target = ["cc", "-target", "aarch64-macos", f"-mcpu={cpu}", "-Wno-unused-command-line-argument"]
    command = [sys.executable, "-m", "ziglang", *target, "-std=c11", "-O3", "-Wall", "-Wextra", *flags]
    command += ["-I", NEON / "include", "-S", NEON / f"src/{source}.c", "-o"]
    inputs = importlib.metadata.version("ziglang"), *command, contents(NEON)
    return built_file("apple", lambda to: _run(*command, to), *inputs).read_bytes()


@functools.cache
def version(cc):
    """What the compiler says of itself: another version builds anew."""
    return subprocess.run([cc, "--version"], capture_output=True, text=True, check=False).stdout


def _run(*command):
    """The command must end well and print no warning. Clang warns of loops that it could not vectorise."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning:" not in done.stdout + done.stderr


@functools.cache
def _has(cc, flags):
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "empty.c"), Path(folder, "empty")
        source.write_text("int main(void) { return 0; }")
        command = [cc, *flags.split(), source, "-o", program]
        made = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return made and subprocess.run([program], capture_output=True, check=False).returncode == 0


def compare(*command, **environment):
    """Run a program that compares implementations; returns their names."""
    lines = _lines(command, environment)
    assert lines[-1].endswith(" 0 differences")
    return _compared_names(lines)


def implementations(*command, **environment):
    """Run the decoder's program; returns the names of the implementations that it compared."""
    lines = _lines(command, environment)
    assert lines[-1] == "0 failures"
    assert "64 tokens: 0 allocations, 0 mappings" in lines
    return _compared_names(lines)


def _lines(command, environment):
    command, environment = [str(each) for each in command], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def _compared_names(lines):
    return [line.split(":")[0] for line in lines if line.endswith(": compared")]
