"""The tests themselves run on macOS, as far as Linux can tell: tests/as_macos.py and two rules."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
PROBE = """
import os, resource
from pathlib import Path
import pytest

def test_what_is_missing():
    for path in ("/proc/self/statm", "/dev/full"):
        assert not os.path.exists(path) and not Path(path).exists()
        for read in (open, os.stat, lambda p: Path(p).read_text(), lambda p: os.open(p, os.O_RDONLY)):
            with pytest.raises(FileNotFoundError):
                read(path)
    with pytest.raises(FileNotFoundError):
        os.listdir("/proc")
    with pytest.raises(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))

def test_what_is_there(tmp_path):
    (tmp_path / "x").write_text("x")
    assert os.listdir(tmp_path) == ["x"] and Path("/dev/null").exists() and os.listdir("/dev/fd")
"""


def as_macos(*words: object) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "tests.as_macos", "-q", *map(str, words)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plugin_hides_what_macos_lacks():
    """From a file of tests/, and from no other: the code under test keeps /proc."""
    probe = TESTS / "probe_of_as_macos.py"
    probe.write_text(PROBE)
    try:
        assert "2 passed" in as_macos(probe)
    finally:
        probe.unlink()
    assert Path("/proc").exists() == (sys.platform == "linux")


def test_what_asks_the_system_also_runs_without_it():
    as_macos(TESTS / "models/test_mapped.py")


def test_no_test_takes_mlx_s_default_device_unnoticed():
    """That is a GPU on a Mac, which computes in float16."""
    found = [f"{file.relative_to(TESTS)}:{line}" for file in FILES for line in calls_without_device(file)]
    assert not found, "say MLXBackend(model, device=...)"


def calls_without_device(file: Path) -> Iterator[int]:
    """Line numbers."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            name, words = ast.unparse(node.func).rpartition(".")[2], {k.arg for k in node.keywords}
            unnamed = name == "MLXBackend" and len(node.args) < 2 and "device" not in words
            if unnamed or (name == "open_backend" and ast.unparse(node.args[0]) == "'mlx'"):
                yield node.lineno
