"""The C program neon/tests/compare.c, built from source: under sanitizers, and for 64-bit ARM."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NEON = Path(__file__).parents[2] / "neon"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all"


def tool(name):
    """A tool from the PATH or from the environment that runs the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return shutil.which(name, path=path)


def compiler(*names):
    found = next((path for name in names if (path := tool(name))), None)
    return found or pytest.skip(f"no C compiler: {' or '.join(names)}")


def build(folder, *options, program="rvm_compare"):
    """Compile a program of neon/tests in `folder`; returns it."""
    cmake = tool("cmake") or pytest.skip("no cmake")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"] if tool("ninja") else []
    configure = [cmake, "-S", str(NEON), "-B", str(folder), "-DRVM_TESTS=ON", *generator, *options]
    for command in (configure, [cmake, "--build", str(folder), "--target", program]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stdout + done.stderr
    return folder / program


def compare(*command):
    """Run it; returns the implementations that were compared."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" 0 differences")
    return [line.split(":")[0] for line in done.stdout.splitlines() if line.endswith(": compared")]


def has_sanitizers(cc, folder):
    """clang packages often come without the sanitizers' run-time library."""
    (folder / "empty.c").write_text("int main(void) { return 0; }")
    command = [cc, *SANITIZE.split(), folder / "empty.c", "-o", folder / "empty"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_agree_with_either_compiler(name, tmp_path):
    """The plain build: no difference to the scalar twin, no compiler warning (a lost vector loop is one)."""
    program = build(tmp_path, f"-DCMAKE_C_COMPILER={compiler(name)}")
    assert compare(program)[-1] == "scalar"


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_agree_under_sanitizers(name, tmp_path):
    """No access outside an array, no undefined behaviour, no leak."""
    cc = compiler(name)
    if not has_sanitizers(cc, tmp_path):
        pytest.skip(f"{name} has no sanitizer library here")
    program = build(tmp_path, f"-DCMAKE_C_COMPILER={cc}", f"-DCMAKE_C_FLAGS={SANITIZE}")
    assert compare(program)[-1] == "scalar"


def test_neon_agrees_under_qemu(tmp_path):
    """The ARM code that Apple Silicon and Linux on ARM run, executed on this machine."""
    cc = compiler("aarch64-linux-gnu-gcc")
    qemu = tool("qemu-aarch64") or tool("qemu-aarch64-static") or pytest.skip("no qemu-user")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_C_COMPILER={cc}", "-DCMAKE_EXE_LINKER_FLAGS=-static"]
    assert compare(qemu, build(tmp_path, *target)) == ["neon", "scalar"]


@pytest.mark.parametrize("source", ["kernels", "attend", "demote"])
def test_it_compiles_for_apple_silicon_and_vectorises(source, tmp_path):
    """clang for arm64 macOS (PyPI ziglang carries the headers): no warning, and 4-lane arithmetic."""
    pytest.importorskip("ziglang", reason="PyPI ziglang is not installed")
    target = ["cc", "-target", "aarch64-macos", "-mcpu=apple_m1", "-std=c11", "-O3", "-Wall", "-Wextra"]
    flags = [
        "-Wno-unused-command-line-argument",
        "-fno-math-errno",
        "-fno-trapping-math",
        f"-ffp-contract={'off' if source == 'demote' else 'fast'}",
        "-fopenmp-simd",
    ]
    files = [
        "-I",
        NEON / "include",
        "-DRVM_IMPL=neon",
        "-S",
        NEON / f"src/{source}.c",
        "-o",
        tmp_path / "k.s",
    ]
    command = [sys.executable, "-m", "ziglang", *target, *flags, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning:" not in done.stderr
    four_lanes, least = {"kernels": (b"fmla.4s", 50), "attend": (b"fmla.4s", 20), "demote": (b"fdiv.4s", 5)}[
        source
    ]
    assert (tmp_path / "k.s").read_bytes().count(four_lanes) > least
