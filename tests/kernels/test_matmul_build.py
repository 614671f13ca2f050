"""The C programs compare_matmul and compare_pages, built from source: also under sanitizers, and for ARM."""

import subprocess
import sys

import pytest

from .c_programs import ADDRESS, NEON, build, compare, compiler, for_arm, sanitized

PROGRAMS = ("rvm_compare_matmul", "rvm_compare_pages")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_return_the_same_bits(name, program):
    """Whatever the compiler, the sizes, the split, the alignment and the values; pages too."""
    assert compare(build(program, compiler(name)))[-1] == "scalar"


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_no_access_outside_an_array_and_no_undefined_behaviour(name, program):
    assert compare(sanitized(program, compiler(name), ADDRESS))[-1] == "scalar"


@pytest.mark.parametrize("program", PROGRAMS)
def test_arm_runs_under_qemu(program):
    """Plain NEON, dotprod and i8mm, executed on this machine."""
    qemu, built = for_arm(program)
    assert compare(qemu, "-cpu", "max", built) == ["neon_i8mm", "neon_dotprod", "neon", "scalar"]
    assert compare(qemu, "-cpu", "cortex-a72", built) == ["neon", "scalar"]


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
