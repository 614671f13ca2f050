"""In one thread, neither ruvmlx nor llama.cpp changes the AMX tile configuration that the other has set."""

import subprocess
import sys

import pytest

_BOTH = """
import sys
from llama_cpp import Llama
from ruvmlx.kernels import matmul
from ruvmlx.backends.native.backend import NativeBackend
from pathlib import Path
from ruvmlx.models.load import load_gguf

def theirs():
    model = Llama(sys.argv[1], n_ctx=128, n_threads=2, verbose=False, logits_all=True)
    model.eval(list(range(100, 164)))
    return model.scores[63].copy()

first = theirs()
matmul.peak(10)
assert (theirs() == first).all()
backend = NativeBackend(load_gguf(Path(sys.argv[1])), threads=1)
ours = backend.verify(list(range(100, 164)), backend.new_cache())
assert (theirs() == first).all()
assert (backend.verify(list(range(100, 164)), backend.new_cache()) == ours).all()
"""


def test_tiles_are_given_back(starter_file):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (uv sync --group oracle)")
    done = subprocess.run(
        [sys.executable, "-c", _BOTH, str(starter_file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
