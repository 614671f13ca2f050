"""The C programs of neon/tests, built from source: by either compiler, under sanitizers, and for 64-bit ARM.

One file, so that one process builds them, and each set of options once.
"""

import os
import subprocess

import pytest

from .c_programs import ADDRESS, THREAD, build, compare, compiler, for_apple_silicon, for_arm, sanitized

KERNELS = "rvm_compare"
MATRICES = ("rvm_compare_matmul", "rvm_compare_pages")
DECODER = "rvm_decoder_test"


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_agree_with_either_compiler(name):
    """The plain build: no difference to the scalar twin, no compiler warning (a lost vector loop is one)."""
    assert compare(build(KERNELS, compiler(name)))[-1] == "scalar"


@pytest.fixture
def few(full):
    """Where each step is slow, a third of all sizes will do; all of them with --full."""
    return {} if full else {"RVM_FEW": "1"}


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_agree_under_sanitizers(name, few):
    """No access outside an array, no undefined behaviour, no leak."""
    assert compare(sanitized(KERNELS, compiler(name), ADDRESS), **few)[-1] == "scalar"


def test_neon_agrees_under_qemu(few):
    """The ARM code that Apple Silicon and Linux on ARM run, executed on this machine."""
    assert compare(*for_arm(KERNELS), **few) == ["neon", "scalar"]


@pytest.mark.parametrize(
    "source, instruction, least",
    [("kernels", b"fmla.4s", 50), ("attend", b"fmla.4s", 20), ("demote", b"fdiv.4s", 5)],
)
def test_it_compiles_for_apple_silicon_and_vectorises(source, instruction, least):
    """No warning, and 4-lane arithmetic."""
    exact = f"-ffp-contract={'off' if source == 'demote' else 'fast'}"
    flags = ["-fno-math-errno", "-fno-trapping-math", exact, "-fopenmp-simd", "-DRVM_IMPL=neon"]
    assert for_apple_silicon(source, "apple_m1", *flags).count(instruction) > least


@pytest.mark.parametrize("program", MATRICES)
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_return_the_same_bits(name, program):
    """Whatever the compiler, the sizes, the split, the alignment and the values; pages too."""
    assert compare(build(program, compiler(name)))[-1] == "scalar"


@pytest.mark.parametrize("program", MATRICES)
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_no_access_outside_an_array_and_no_undefined_behaviour(name, program, few):
    assert compare(sanitized(program, compiler(name), ADDRESS), **few)[-1] == "scalar"


@pytest.mark.parametrize("program", MATRICES)
def test_arm_runs_under_qemu(program, few):
    """Plain NEON, dotprod and i8mm, executed on this machine."""
    qemu, built = for_arm(program)
    assert compare(qemu, "-cpu", "max", built, **few) == ["neon_i8mm", "neon_dotprod", "neon", "scalar"]
    assert compare(qemu, "-cpu", "cortex-a72", built, **few) == ["neon", "scalar"]


@pytest.mark.parametrize(
    "name, cpu, instruction",
    [
        ("neon", "generic", b"smlal"),
        ("neon_dotprod", "apple_m1", b"sdot"),
        ("neon_i8mm", "apple_m2", b"usmmla"),
    ],
)
def test_matrices_compile_for_apple_silicon(name, cpu, instruction, full):
    """No warning, and the right instructions."""
    if name == "neon" and not full:
        pytest.skip("no Apple Silicon needs it, and it compiles for 40 s: with --full")
    assert instruction in for_apple_silicon(f"matrix_{name}", cpu, "-ffp-contract=off")


def implementations(*command, **environment):
    """Run the decoder's program; the implementations that it compared."""
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 failures"
    assert "64 tokens: 0 allocations, 0 mappings" in lines
    return [line.split(":")[0] for line in lines if line.endswith(": compared")]


def test_the_decoder_agrees_allocates_nothing_and_stops():
    """Implementations agree, threads change no bit, no allocation while decoding, cancel, fork."""
    assert implementations(build(DECODER, compiler("gcc", "clang")))[-1] == "scalar"


@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address", "thread"])
def test_decoder_under_sanitizers(flags, few):
    """No access outside an array, no undefined behaviour, no leak; no race between the threads."""
    # TSan kills forked children that start threads, and makes every access twenty times as slow.
    less = {"RVM_NO_FORK": "1", "RVM_FEW": "1"} if flags is THREAD else few
    assert implementations(sanitized(DECODER, compiler("gcc", "clang"), flags), **less)[-1] == "scalar"


def test_decoder_under_qemu(few):
    """The ARM code, threads included, executed on this machine; few: by the fastest matrices alone,
    whose bits are those of the others."""
    qemu, program = for_arm(DECODER)
    impls = implementations(qemu, "-cpu", "max", program, RVM_NO_FORK="1", **few)
    assert impls == (["neon_i8mm", "scalar"] if few else ["neon_i8mm", "neon_dotprod", "neon", "scalar"])
