"""The C programs of neon/tests, built by gcc and by clang, and the library compiled for Apple Silicon.

Without --full the builds with sanitizers (test_c_sanitizers.py) and for ARM (test_c_arm.py) stand for them.
"""

import pytest

from .c_programs import (
    DECODER,
    KERNELS,
    MATRICES,
    build,
    compare,
    compiler,
    for_apple_silicon,
    implementations,
)


@pytest.mark.full("neon")
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_agree_with_either_compiler(name):
    """Each implementation agrees with the scalar one. The compiler prints no warning."""
    assert compare(build(KERNELS, compiler(name)))[-1] == "scalar"


@pytest.mark.full("neon")
@pytest.mark.parametrize("program", MATRICES)
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_all_implementations_return_the_same_bits(name, program, few):
    """For all sizes, splits between threads, alignments and values. Pages are compared, too."""
    assert compare(build(program, compiler(name)), **few)[-1] == "scalar"


@pytest.mark.full("neon")
def test_the_decoder_agrees_allocates_nothing_and_stops():
    """Implementations agree, threads change no bit, no allocation while decoding, cancel, fork."""
    assert implementations(build(DECODER, compiler("gcc", "clang")))[-1] == "scalar"


@pytest.mark.parametrize(
    "source, instruction, least",
    [
        ("kernels", b"fmla.4s", 50),
        ("attend", b"fmla.4s", 20),
        ("demote", b"fdiv.4s", 5),
        ("layers", b"fmla.4s", 50),
    ],
)
def test_it_compiles_for_apple_silicon_and_vectorises(source, instruction, least):
    """No warning, and 4-lane arithmetic."""
    exact = f"-ffp-contract={'off' if source == 'demote' else 'fast'}"
    flags = ["-fno-math-errno", "-fno-trapping-math", exact, "-fopenmp-simd", "-DRVM_IMPL=neon"]
    assert for_apple_silicon(source, "apple_m1", *flags).count(instruction) > least


@pytest.mark.parametrize(
    "name, cpu, instruction",
    [
        pytest.param("neon", "generic", b"smlal", marks=pytest.mark.full("neon")),
        pytest.param("neon_dotprod", "apple_m1", b"sdot", marks=pytest.mark.full("neon")),
        ("neon_i8mm", "apple_m2", b"usmmla"),
    ],
)
def test_matrices_compile_for_apple_silicon(name, cpu, instruction):
    """No warning, and the right instructions."""
    assert instruction in for_apple_silicon(f"matrix_{name}", cpu, "-ffp-contract=off")
