"""The Metal source that MLX makes of each kernel, on any machine: golden files, types, features, memory.

`RUVMLX_WRITE_GOLDEN=1 pytest tests/metal/test_msl.py` writes the golden files anew.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ruvmlx.backends.mlx.kernels import demote
from ruvmlx.backends.mlx.kernels.export import source
from ruvmlx.backends.mlx.kernels.source import folder

from . import front_end, simulator
from .front_end import PRELUDE
from .kernels import CUDA_ONLY, KERNELS
from .simulator import LIMIT

HERE = Path(__file__).parent
METAL = [kernel for kernel in KERNELS if kernel not in CUDA_ONLY]
# All that Apple7 (M1) has and we use. simd_at is a variable of ours.
ALLOWED = {"simd_shuffle", "simd_shuffle_xor", "simdgroup_barrier", "simd_at"}


@pytest.mark.parametrize("kernel", METAL, ids=lambda k: k.name)
def test_signature_is_the_golden_one(kernel):
    """Header and body are ours to the letter; what MLX puts around them is kept in golden/NAME.metal."""
    text = source(kernel, KERNELS[kernel][-1])
    for ours, name in ((kernel.header("metal"), "header"), (kernel.metal_body(), "body")):
        assert text.count(ours.strip()) == 1, name
        text = text.replace(ours.strip(), f"// ... {name} ...")
    golden = HERE / "golden" / f"{kernel.name}.metal"
    if os.environ.get("RUVMLX_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


FLAGS = [
    *("--target=aarch64-none-elf", "-std=c++14", "-fsyntax-only", "-Wall", "-Werror"),
    *(
        "-Wno-unknown-attributes",
        "-Wno-unknown-pragmas",
        "-Wno-ignored-attributes",
        "-Wno-unused-const-variable",
    ),
    *("-Wno-unused-function", "-Wno-undefined-inline", "-Wno-sign-compare"),
]


@pytest.fixture
def complaints(tmp_path):
    """complaints(text) -> what clang says of Metal source as C++14, with the template as MLX wrote it.

    test_front_end.py knows more of Metal, but it fills the template in, and its language has C++17.
    """
    clang = shutil.which("clang++")
    if not clang:
        pytest.skip("no clang++ to check Metal source with")

    def complaints(text: str) -> str:
        # C++ knows no automatic variables in an address space, and no [[kernel]] there.
        assert ("threadgroup T name[n]" in text) == ("SHARED(" in text)
        text = text.replace("threadgroup T name[n]", "static threadgroup T name[n]")
        text = re.sub(r'template \[\[host_name\("\w+"\)\]\] \[\[kernel\]\]', "template", text)
        file = tmp_path / "kernel.cpp"
        file.write_text(f'#include "{PRELUDE}"\n{text}')
        done = subprocess.run([clang, *FLAGS, str(file)], capture_output=True, text=True)
        assert bool(done.stderr) == bool(done.returncode)
        return done.stderr[:4000]

    return complaints


@pytest.mark.parametrize("kernel", METAL, ids=lambda k: k.name)
def test_it_is_cpp14_and_a_template(complaints, kernel):
    assert complaints(source(kernel, KERNELS[kernel][-1])) == ""


@pytest.mark.parametrize(
    "line,complaint",
    [
        ("Row<D>::Word y = 0; (void)y;", "missing 'typename'"),
        ("if constexpr (D == 64) {}", "C++17 extension"),
    ],
)
def test_what_only_the_template_shows(complaints, line, complaint):
    """The other check, which fills the template in and is C++17, takes all of these."""
    header = "template <int N> struct Row { typedef int Word; };\n"
    kernel = demote.DEMOTE
    whole = source(kernel, kernel.values[0])
    start = "template <int D, int TO>\n[[kernel]]"
    wrong = whole.replace(start, header + start)
    wrong = wrong.replace("const int n_kv =", f"{line} const int n_kv =")
    assert line in wrong and header in wrong
    assert complaint in complaints(wrong)
    assert front_end.complaints(wrong) == []


@pytest.mark.parametrize("kernel", METAL, ids=lambda k: k.name)
def test_nothing_newer_than_apple7(kernel):
    """No SIMD or atomic function but shuffles and barriers, no matrices, no 64-bit or 16-bit brain floats."""
    text = re.sub(r"//.*", "", source(kernel, KERNELS[kernel][0]))
    words = set(re.findall(r"\b(?:simd|quad|simdgroup|atomic|imageblock|mesh|ray|tensor)_\w+", text))
    assert words <= ALLOWED
    assert not re.search(r"\b(bfloat|double|long long|printf|simdgroup_matrix)\b", text)


def test_no_kernel_defines_device():
    """A macro of that name would break CUDA's __device__."""
    files = [*folder().glob("*.h"), *folder().glob("*.metal")]
    assert len(files) > 12
    for file in files:
        assert not re.search(r"#\s*define\s+(device|thread|threadgroup|constant)\b", file.read_text())
        assert not re.search(r"\)?\.[xyzw]{2,4}\b", re.sub(r"//.*", "", file.read_text())), (
            f"swizzle in {file}"
        )


def test_every_body_has_a_row():
    bodies = {file.stem for file in folder().glob("*.metal")}
    assert bodies == {Path(kernel.file).stem for kernel in KERNELS}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_threadgroup_memory_is_within_the_limit(kernel, tmp_path):
    """Counted by clang++ or g++ from the declarations, for every template value."""
    declared = re.findall(r"^SHARED\((\w+), \w+, (.*)\);", kernel.body(), flags=re.M)
    before = kernel.body().split("SHARED(")[0]
    constants = "\n".join(re.findall(r"^(?:typedef|constexpr).*;", before, flags=re.M))
    total = " + ".join(f"sizeof({c_type}) * ({n})" for c_type, n in declared) or "0"
    includes = "".join(f'#include "{folder() / h}"\n' for h in ("dialect_sim.h", *kernel.headers))
    checks = ""
    for i, chosen in enumerate(KERNELS[kernel]):
        values = simulator.constants(kernel, chosen)
        checks += (
            f'void check_{i}() {{\n{values}{constants}\nstatic_assert({total} <= {LIMIT}, "too much");\n}}\n'
        )
    source = tmp_path / "memory.cpp"
    source.write_text(includes + checks)
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    done = subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:4000]
