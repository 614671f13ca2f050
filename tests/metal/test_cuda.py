"""The bodies as CUDA C++: nvcc compiles them all, without a GPU. What they compute: cuda/harness.cu."""

import shutil
import subprocess

import pytest

from ruvmlx.kernels.metal.source import folder

from .kernels import KERNELS


@pytest.fixture(scope="module")
def nvcc():
    found = shutil.which("nvcc")
    if not found:
        pytest.skip("no nvcc to compile the kernels as CUDA with")
    return found


def test_nvcc_compiles_every_body(nvcc, tmp_path):
    """One of each kernel's template values, and the arguments in the order that MLX passes them."""
    headers = dict.fromkeys(h for kernel in KERNELS for h in ("dialect_cuda.h", *kernel.headers))
    source = "".join(f'#include "{name}"\n' for name in headers)
    for kernel, templates in KERNELS.items():
        values = zip(kernel.templates, templates[-1], strict=True)
        constants = "".join(f"constexpr int {name} = {value};\n" for name, value in values)
        arguments = [f"const {t} *{n}" for n, t in kernel.inputs] + [f"{t} *{n}" for n, t in kernel.outputs]
        source += f"__global__ void {kernel.name}({', '.join(arguments)}) {{\n{constants}"
        source += f'#include "{kernel.name}.metal"\n}}\n'
    file = tmp_path / "kernels.cu"
    file.write_text(source)
    flags = ["-arch=sm_80", "-O1", "--ptx", "-Werror", "all-warnings", "-I", str(folder())]
    done = subprocess.run(
        [nvcc, *flags, str(file), "-o", str(tmp_path / "kernels.ptx")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:4000]
    ptx = (tmp_path / "kernels.ptx").read_text()
    assert ptx.count(".entry") == len(KERNELS)
    assert ".f64" not in ptx, "a float became a double on the way"
    assert "ld.local" not in ptx, "an array is indexed at run time and left the registers"
