"""The C program neon/tests/decoder_test.c, built from source: plain, under sanitizers, and for 64-bit ARM."""

import os
import subprocess

import pytest

from tests.kernels.test_native_build import NEON, compiler, tool

SANITIZERS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread -fno-sanitize-recover=all",
}


def build(folder, *options):
    cmake = tool("cmake") or pytest.skip("no cmake")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"] if tool("ninja") else []
    configure = [cmake, "-S", str(NEON), "-B", str(folder), "-DRVM_TESTS=ON", *generator, *options]
    for command in (configure, [cmake, "--build", str(folder), "--target", "rvm_decoder_test"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "rvm_decoder_test"


def run(*command, **environment):
    env = os.environ | environment
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 failures"
    assert "64 tokens: 0 allocations, 0 mappings" in lines
    return [line.split(":")[0] for line in lines if line.endswith(": compared")]


def has_sanitizer(cc, flags, folder):
    (folder / "empty.c").write_text("int main(void) { return 0; }")
    command = [cc, *flags.split(), folder / "empty.c", "-o", folder / "empty"]
    made = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return made and subprocess.run([folder / "empty"], capture_output=True, check=False).returncode == 0


def test_decoder(tmp_path):
    """Implementations agree, threads change no bit, no allocation while decoding, cancel, fork."""
    assert run(build(tmp_path, f"-DCMAKE_C_COMPILER={compiler('gcc', 'clang')}"))[-1] == "scalar"


@pytest.mark.parametrize("kind", SANITIZERS)
def test_decoder_under_sanitizers(kind, tmp_path):
    """No access outside an array, no undefined behaviour, no leak; no race between the threads."""
    cc = compiler("gcc", "clang")
    if not has_sanitizer(cc, SANITIZERS[kind], tmp_path):
        pytest.skip(f"no {kind} sanitizer here")
    flags = SANITIZERS[kind]
    program = build(tmp_path, f"-DCMAKE_C_COMPILER={cc}", f"-DCMAKE_C_FLAGS={flags}")
    skip = {"RVM_NO_FORK": "1"} if kind == "thread" else {}  # TSan kills forked children that start threads
    assert run(program, **skip)[-1] == "scalar"


def test_decoder_under_qemu(tmp_path):
    """The ARM code, threads included, executed on this machine."""
    cc = compiler("aarch64-linux-gnu-gcc")
    qemu = tool("qemu-aarch64") or tool("qemu-aarch64-static") or pytest.skip("no qemu-user")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_C_COMPILER={cc}", "-DCMAKE_EXE_LINKER_FLAGS=-static"]
    impls = run(qemu, "-cpu", "max", build(tmp_path, *target), RVM_NO_FORK="1")
    assert "neon" in impls and impls[-1] == "scalar"
