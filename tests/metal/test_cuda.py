"""The bodies as CUDA C++: nvcc compiles them all, without a GPU. What they compute: cuda/harness.cu."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ruvmlx.backends.mlx.kernels.source import folder
from ruvmlx.platform.mx import mx

from .kernels import KERNELS
from .simulator import body_lines, constants

NAMES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}


@pytest.fixture(scope="module")
def nvcc():
    found = shutil.which("nvcc")
    if not found:
        pytest.skip("no nvcc to compile the kernels as CUDA with")
    return found


def compiled(nvcc: str, source: Path, build: Path, *flags: str) -> str:
    """PTX of `source`, in which nvcc warns of nothing."""
    out = build / f"{source.stem}.ptx"
    command = [nvcc, "-arch=sm_80", "--ptx", "-Werror", "all-warnings", *flags, str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return out.read_text()


def test_nvcc_compiles_the_harness(nvcc, tmp_path):
    """With every kernel in it. Unoptimised: optimising takes ten times as long and gives no more warnings."""
    ptx = compiled(nvcc, folder() / "cuda" / "harness.cu", tmp_path, "-Xcicc", "-O0")
    missing = [kernel.name for kernel in KERNELS if not re.search(rf"\.entry \w*\d{kernel.name}(I|PK)", ptx)]
    assert not missing


def test_the_harness_launches_each_kernel_with_its_threads():
    """The program once launched rope_append with 64 threads, when the kernel needed 256."""
    text = "".join((folder() / "cuda" / name).read_text() for name in ("layer.h", "checks.h", "times.h"))
    threads = {name: int(n) for name, n in re.findall(r"\b([A-Z_]+)_THREADS = (\d+)", text)}
    for kernel in KERNELS:  # attend_decode_matrix has the threads of attend_decode
        name = max((n for n in threads if kernel.name.upper().startswith(n)), key=len, default="")
        assert kernel.threads == threads.get(name), kernel.name
    launches = re.findall(r"(\w+)(?:<[^<>]*>)?<<<(.*?)>>>", text)
    numbers = [found for found in launches if re.search(r",\s*\d{2,}\b", found[1])]
    assert len(launches) > 8 and {name for name, _ in numbers} == {"only_read"}  # no kernel of ours


def test_nvcc_compiles_every_body(nvcc, tmp_path):
    """One of each kernel's template values, and the arguments in the order that MLX passes them."""
    headers = dict.fromkeys(h for kernel in KERNELS for h in ("dialect_cuda.h", *kernel.headers))
    source = "".join(f'#include "{name}"\n' for name in headers)
    for kernel, templates in KERNELS.items():
        typed = {"T": next((NAMES[v] for v in templates[-1] if isinstance(v, mx.Dtype)), "")}
        arguments = [f"const {typed.get(t, t)} *{n}" for n, t in kernel.inputs]
        arguments += [f"{typed.get(t, t)} *{n}" for n, t in kernel.outputs]
        declared = constants(kernel, templates[-1], NAMES)
        source += f"__global__ void {kernel.name}({', '.join(arguments)}) {{\n{declared}\n"
        source += f"{body_lines(kernel)}\n}}\n"
    file = tmp_path / "kernels.cu"
    file.write_text(source)
    ptx = compiled(nvcc, file, tmp_path, "-O1", "-I", str(folder()))
    assert ptx.count(".entry") == len(KERNELS)
    assert ".f64" not in ptx, "a float became a double on the way"
    assert "ld.local" not in ptx, "an array is indexed at run time and left the registers"
