"""The C program neon/tests/decoder_test.c, built from source: plain, under sanitizers, and for 64-bit ARM."""

import os
import subprocess

import pytest

from .c_programs import ADDRESS, THREAD, build, compiler, for_arm, sanitized

PROGRAM = "rvm_decoder_test"


def run(*command, **environment):
    env = os.environ | environment
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 failures"
    assert "64 tokens: 0 allocations, 0 mappings" in lines
    return [line.split(":")[0] for line in lines if line.endswith(": compared")]


def test_decoder():
    """Implementations agree, threads change no bit, no allocation while decoding, cancel, fork."""
    assert run(build(PROGRAM, compiler("gcc", "clang")))[-1] == "scalar"


@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address", "thread"])
def test_decoder_under_sanitizers(flags):
    """No access outside an array, no undefined behaviour, no leak; no race between the threads."""
    skip = {"RVM_NO_FORK": "1"} if flags is THREAD else {}  # TSan kills forked children that start threads
    assert run(sanitized(PROGRAM, compiler("gcc", "clang"), flags), **skip)[-1] == "scalar"


def test_decoder_under_qemu():
    """The ARM code, threads included, executed on this machine."""
    qemu, program = for_arm(PROGRAM)
    impls = run(qemu, "-cpu", "max", program, RVM_NO_FORK="1")
    assert "neon" in impls and impls[-1] == "scalar"
