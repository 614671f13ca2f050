"""The C program neon/tests/compare.c, built from source: under sanitizers, and for 64-bit ARM."""

import subprocess
import sys

import pytest

from .c_programs import ADDRESS, NEON, build, compare, compiler, for_arm, sanitized

PROGRAM = "rvm_compare"


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_agree_with_either_compiler(name):
    """The plain build: no difference to the scalar twin, no compiler warning (a lost vector loop is one)."""
    assert compare(build(PROGRAM, compiler(name)))[-1] == "scalar"


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_agree_under_sanitizers(name):
    """No access outside an array, no undefined behaviour, no leak."""
    assert compare(sanitized(PROGRAM, compiler(name), ADDRESS))[-1] == "scalar"


def test_neon_agrees_under_qemu():
    """The ARM code that Apple Silicon and Linux on ARM run, executed on this machine."""
    assert compare(*for_arm(PROGRAM)) == ["neon", "scalar"]


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
