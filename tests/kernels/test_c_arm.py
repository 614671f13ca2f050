"""The C programs of neon/tests, compiled for 64-bit ARM and executed by qemu.

Apple Silicon and Linux on ARM run this code.
"""

import pytest

from .c_programs import DECODER, KERNELS, MATRICES, compare, for_arm, implementations


@pytest.fixture(params=["clang", pytest.param("gcc", marks=pytest.mark.full("neon"))])
def arm_compiler(request):
    return request.param


def test_neon_agrees_under_qemu(few, arm_compiler):
    """The ARM code that Apple Silicon and Linux on ARM run, executed on this machine."""
    assert compare(*for_arm(KERNELS, arm_compiler), **few) == ["neon", "scalar"]


@pytest.mark.parametrize("program", MATRICES)
def test_arm_runs_under_qemu(program, few, arm_compiler):
    """Plain NEON, dotprod and i8mm, executed on this machine."""
    qemu, built = for_arm(program, arm_compiler)
    assert compare(qemu, "-cpu", "max", built, **few) == ["neon_i8mm", "neon_dotprod", "neon", "scalar"]
    assert compare(qemu, "-cpu", "cortex-a72", built, **few) == ["neon", "scalar"]


def test_decoder_under_qemu(few, arm_compiler):
    """The ARM code, threads included, executed on this machine; few: by the fastest matrices alone,
    whose bits are those of the others."""
    qemu, program = for_arm(DECODER, arm_compiler)
    impls = implementations(qemu, "-cpu", "max", program, RVM_NO_FORK="1", **few)
    assert impls == (["neon_i8mm", "scalar"] if few else ["neon_i8mm", "neon_dotprod", "neon", "scalar"])
