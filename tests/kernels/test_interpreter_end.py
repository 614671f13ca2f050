"""Objects of the C library that live until the interpreter ends are freed without a word on stderr."""

import subprocess
import sys

import pytest

PAGE = "from ruvmlx.kernels import page_table as module\nkept = module.PageMemory.make(64)"
# `rvm_decoder_destroy` accepts a null pointer, but `__del__` does not pass one. So this pointer is true.
DECODER = """
import ctypes
from ruvmlx.kernels import decoder as module
class Null(ctypes.c_void_p):
    def __bool__(self): return True
kept = object.__new__(module.Decoder)
kept.handle = Null(0)
module._lib()
"""


@pytest.mark.parametrize("made", [PAGE, DECODER], ids=["page", "decoder"])
def test_an_object_that_python_deletes_after_its_modules_names_is_freed_in_silence(made):
    """Python sets a module's names to None before it deletes what other objects still hold."""
    ends = "for name in list(vars(module)):\n    vars(module)[name] = None\ndel kept"
    done = subprocess.run([sys.executable, "-c", f"{made}\n{ends}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
