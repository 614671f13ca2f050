"""Compiles kernel bodies against dialect_sim.h and runs them, thread by thread, on NumPy arrays."""

import ctypes as C
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels.source import Kernel, folder
from ruvmlx.platform.mx import mx

from ..builds import built_file, contents
from ..kernels.c_programs import version

TYPES = {"float": np.float32, "int": np.int32, "uchar": np.uint8, "ushort": np.uint16, "uint": np.uint32}
NAMES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}  # of values of a template T
FLAGS = [
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-shared",
    "-fPIC",
]
LIMIT = 32 * 1024  # bytes of threadgroup memory


class KernelFault(AssertionError):
    """The simulator stopped a kernel."""


# What the simulator does with each thread of a kernel: start it on a stack of its own, leave it, come back.
CONTEXTS = r"""
#ifdef __APPLE__
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#endif
#include <csetjmp>
#include <cstdlib>
#include <ucontext.h>
static ucontext_t start;
static jmp_buf outside, inside;
static volatile int steps;
static void enter() {
    steps = steps + 1;
    if (!_setjmp(inside)) _longjmp(outside, 1);
    steps = steps + 10;
    _longjmp(outside, 2);
}
int main() {
    const int came = _setjmp(outside);
    if (came == 1) _longjmp(inside, 1);
    if (came == 2) return steps == 11 ? 0 : 1;
    getcontext(&start);
    start.uc_stack.ss_sp = malloc(128 * 1024), start.uc_stack.ss_size = 128 * 1024, start.uc_link = nullptr;
    makecontext(&start, enter, 0);
    setcontext(&start);
    return 2;
}
"""


def compiler() -> str:
    """A C++ compiler that can build the simulator; without one the test is skipped, with the reason."""
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if not found:
        pytest.skip("no C++ compiler: the kernels' simulator cannot be built")
    if why := contexts_fail(found):
        pytest.skip(f"makecontext does not work here, so the kernels' simulator cannot run: {why}")
    return found


@functools.cache
def contexts_fail(found: str, source: str = CONTEXTS) -> str:
    """Why contexts of <ucontext.h> do not work on this system; "" where they do."""
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder, "contexts.cpp"), Path(folder, "contexts")
        file.write_text(source)
        for command in ([found, *flags, "-w", str(file), "-o", str(program)], [str(program)]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                return f"{Path(command[0]).name} ended with {done.returncode} {done.stderr[:200]}".strip()
    return ""


def constants(kernel: Kernel, chosen: Sequence, names: Mapping[mx.Dtype, str] = NAMES) -> str:
    """Declarations of a kernel's template values; `names` of types in the language at hand."""
    said = []
    for name, value in zip(kernel.templates, chosen, strict=True):
        typed = isinstance(value, mx.Dtype)
        said.append(f"using {name} = {names[value]};" if typed else f"constexpr int {name} = {value};")
    return " ".join(said)


def program(kernel: Kernel, body: str, templates: Sequence[Sequence[int]]) -> str:
    """C++ of one kernel for each of the template values."""
    arguments = [*kernel.inputs, *kernel.outputs]
    includes = "".join(f'#include "{name}"\n' for name in ("dialect_sim.h", *kernel.headers))
    parameters = ", ".join(f"sim::Global<{c_type}> {name}" for name, c_type in arguments)
    kinds = ", ".join(("typename " if name == "T" else "int ") + name for name in kernel.templates)
    head = f"template <{kinds}> " if kernel.templates else ""
    out = f"{includes}static void **sim_data; static const size_t *sim_bytes;\n"
    out += f"{head}void kernel({parameters}) {{\n{body}\n}}\n"
    for i, chosen in enumerate(templates):
        named = [NAMES[value] if isinstance(value, mx.Dtype) else str(value) for value in chosen]
        call = f"kernel<{', '.join(named)}>" if kernel.templates else "kernel"
        typed = values_of(arguments, dict(zip(kernel.templates, named, strict=True)).get("T", ""))
        out += f"static void run_{i}(void *) {{ {call}({typed}); }}\n"
    bodies = ", ".join(f"run_{i}" for i in range(len(templates)))
    return (
        out
        + f"""
extern "C" int sim_run(int which, void **data, const size_t *bytes, const uint *groups, int threads,
                       uint64_t seed, char *message, size_t size, size_t *used) {{
    static void (*const bodies[])(void *) = {{{bodies}}};
    sim_data = data, sim_bytes = bytes;
    return sim::run(bodies[which], nullptr, groups, threads, seed, message, size, used);
}}
"""
    )


def body_lines(kernel: Kernel) -> str:
    """The lines that take in a kernel's body, with the word of its option."""
    lines = f'#include "{folder() / kernel.file}"'
    return f"#define {kernel.option}\n{lines}\n#undef {kernel.option}" if kernel.option else lines


def values_of(arguments: Sequence[tuple[str, str]], templated: str) -> str:
    """The call's arguments; those of C type "T" are of the type `templated`."""
    kinds = (templated if c_type == "T" else c_type for _, c_type in arguments)
    return ", ".join(
        f"sim::Global<{kind}>{{(char *)sim_data[{i}], sim_bytes[{i}], 0}}" for i, kind in enumerate(kinds)
    )


def _library(source: str) -> Path:
    """The compiled C++; the same for all processes, and for the next run."""
    command = [compiler(), *FLAGS, "-I", str(folder()), "-x", "c++", "-"]

    def build(to: Path) -> None:
        done = subprocess.run([*command, "-o", str(to)], input=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:8000]

    return built_file("simulator", build, version(compiler()), *command, source, contents(folder()))


class Simulated:
    """A kernel compiled for the simulator."""

    def __init__(self, kernel: Kernel, templates: Sequence[tuple[int, ...]], body: str | None = None):
        self.kernel, self.templates = kernel, list(templates)
        body = body_lines(kernel) if body is None else body
        self._run = C.CDLL(str(_library(program(kernel, body, self.templates)))).sim_run
        self.local_bytes = 0  # threadgroup memory, the most of any run
        self.accesses = 0  # to device memory by the busiest thread of any run

    def __call__(self, inputs, shapes, groups, templates=(), seed: int = 0) -> list[np.ndarray]:
        """As Kernel.__call__. Outputs start as 0xff bytes: what a kernel forgets to write stays NaN."""
        types = TYPES | {"T": _templated(templates)}
        arrays = [_aligned(a, types[t]) for a, (_, t) in zip(inputs, self.kernel.inputs, strict=True)]
        outputs = [_filled(s, types[t]) for s, (_, t) in zip(shapes, self.kernel.outputs, strict=True)]
        before = [a.copy() for a in arrays]
        everything = arrays + outputs
        data = (C.c_void_p * len(everything))(*[a.ctypes.data for a in everything])
        sizes = (C.c_size_t * len(everything))(*[a.nbytes for a in everything])
        message, used = C.create_string_buffer(512), (C.c_size_t * 2)()
        which = self.templates.index(tuple(templates))
        counts = (C.c_uint * 3)(*groups)
        rc = self._run(
            which,
            data,
            sizes,
            counts,
            self.kernel.threads,
            C.c_uint64(seed),
            message,
            C.c_size_t(512),
            used,
        )
        self.local_bytes, self.accesses = max(self.local_bytes, used[0]), max(self.accesses, used[1])
        if rc:
            raise KernelFault(f"{self.kernel.name}{tuple(templates)}: {message.value.decode()}")
        for array, old in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, old, err_msg=f"{self.kernel.name} wrote to an input")
        return outputs


def to_numpy(x) -> np.ndarray:
    """An array of MLX (or NumPy) as NumPy's; bfloat16 is ml_dtypes'."""
    if isinstance(x, mx.array) and x.dtype == mx.bfloat16:
        return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(x)


def to_mx(x: np.ndarray) -> mx.array:
    """The reverse."""
    if x.dtype == ml_dtypes.bfloat16:
        return mx.array(x.view(np.uint16)).view(mx.bfloat16)
    return mx.array(np.ascontiguousarray(x))


def _templated(templates: Sequence) -> type:
    """NumPy's type of arrays of C type "T"; bfloat16 is ml_dtypes'."""
    kinds = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: ml_dtypes.bfloat16}
    return next((kinds[value] for value in templates if isinstance(value, mx.Dtype)), np.float32)


def _aligned(array, dtype) -> np.ndarray:
    array = np.ascontiguousarray(array)
    assert array.dtype == dtype, f"array is {array.dtype}, expected {np.dtype(dtype)}"
    out = _filled(array.shape, dtype)
    out[...] = array
    return out


def _filled(shape, dtype) -> np.ndarray:
    """Bytes 0xff at an address that any word may start at."""
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(n + 64, 255, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n].view(dtype).reshape(shape)
