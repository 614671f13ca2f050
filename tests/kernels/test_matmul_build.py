"""The C programs compare_matmul and compare_pages, built from source: also under sanitizers, and for ARM."""

import subprocess
import sys

import pytest

from .test_native_build import NEON, SANITIZE, build, compare, compiler, has_sanitizers, tool

PROGRAMS = ("rvm_compare_matmul", "rvm_compare_pages")


def build_both(folder, *options):
    """In one folder, for the matrix kernels take long to compile."""
    return [build(folder, *options, program=program) for program in PROGRAMS]


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_return_the_same_bits(name, tmp_path):
    """Whatever the compiler, the sizes, the split, the alignment and the values; pages too."""
    for program in build_both(tmp_path, f"-DCMAKE_C_COMPILER={compiler(name)}"):
        assert compare(program)[-1] == "scalar"


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_no_access_outside_an_array_and_no_undefined_behaviour(name, tmp_path):
    cc = compiler(name)
    if not has_sanitizers(cc, tmp_path):
        pytest.skip(f"{name} has no sanitizer library here")
    options = [f"-DCMAKE_C_COMPILER={cc}", f"-DCMAKE_C_FLAGS={SANITIZE}", "-DRVM_MATRIX_O=-O1"]
    for program in build_both(tmp_path, *options):
        assert compare(program)[-1] == "scalar"


def test_arm_runs_under_qemu(tmp_path):
    """Plain NEON, dotprod and i8mm, executed on this machine."""
    cc = compiler("aarch64-linux-gnu-gcc")
    qemu = tool("qemu-aarch64") or tool("qemu-aarch64-static") or pytest.skip("no qemu-user")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_C_COMPILER={cc}", "-DCMAKE_EXE_LINKER_FLAGS=-static"]
    for program in build_both(tmp_path, *target):
        assert compare(qemu, "-cpu", "max", program) == ["neon_i8mm", "neon_dotprod", "neon", "scalar"]
        assert compare(qemu, "-cpu", "cortex-a72", program) == ["neon", "scalar"]


@pytest.mark.parametrize(
    "name,cpu,instruction",
    [
        ("neon", "generic", b"smlal"),
        ("neon_dotprod", "apple_m1", b"sdot"),
        ("neon_i8mm", "apple_m2", b"usmmla"),
    ],
)
def test_it_compiles_for_apple_silicon(name, cpu, instruction, tmp_path):
    """clang for arm64 macOS (PyPI ziglang carries the headers): no warning, and the right instructions."""
    pytest.importorskip("ziglang", reason="PyPI ziglang is not installed")
    target = [
        "cc",
        "-target",
        "aarch64-macos",
        f"-mcpu={cpu}",
        "-Wno-unused-command-line-argument",
        "-std=c11",
        "-O3",
        "-Wall",
        "-Wextra",
        "-ffp-contract=off",
    ]
    source = ["-I", NEON / "include", "-S", NEON / f"src/matrix_{name}.c", "-o", tmp_path / "m.s"]
    command = [sys.executable, "-m", "ziglang", *target, *source]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning:" not in done.stderr
    assert instruction in (tmp_path / "m.s").read_bytes()
