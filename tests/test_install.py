"""The README's section "Install", and .ci/readme_install.py, which runs its lines as they stand there."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
_SPEC = importlib.util.spec_from_file_location("readme_install", ROOT / ".ci/readme_install.py")
assert _SPEC and _SPEC.loader
readme_install = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(readme_install)
WAYS, COMMANDS = readme_install.install_lines(README)


def test_a_line_for_each_system_installs_uv_and_two_commands_follow():
    assert list(WAYS) == ["brew", "pipx", "python3"]
    assert [command.split()[:3] for command in COMMANDS] == [["uv", "run", "ruvmlx"], ["uv", "run", "pytest"]]


@pytest.mark.parametrize("line", [*WAYS.values(), *COMMANDS])
def test_the_page_has_the_same_line(line):
    assert f"\n    {line}\n" in (ROOT / "docs/install.md").read_text("utf-8")


def test_no_line_installs_into_an_externally_managed_python():
    """Homebrew's and Debian's Python refuse `pip install` outside a virtual environment (PEP 668)."""
    for line in WAYS.values():
        assert "pip install" not in line or "~/.uv/bin/pip install" in line


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_zsh_takes_the_install_lines_as_they_stand(page):
    """zsh, the shell of macOS, takes `# words` as arguments, so `brew install uv # macOS` fails."""
    lines = re.findall(r"(?m)^ {4}.*", (ROOT / page).read_text("utf-8"))
    assert len(lines) > 10 and not [line for line in lines if " #" in line]


@pytest.fixture
def stranger(tmp_path):
    """Runs the script with programs in the place of uv and its installers; (exit code, their calls)."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    (tmp_path / "home/ruvmlx").mkdir(parents=True), tools.mkdir()

    def run(way: str, answer: str) -> tuple[int, list[str]]:
        said = f'[ "$2" != ruvmlx ] || {{ cat; echo "Assistant: {answer}"; }}'
        for name in ("brew", "pipx", "uv"):
            body = f'#!/bin/sh\necho "{name} $* $PYTEST_ADDOPTS" >> {calls}\n'
            (tools / name).write_text(body + (said if name == "uv" else ""))
            (tools / name).chmod(0o755)
        text = readme_install.script(way, all_tests=False)
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path / "home")}
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, check=False)
        return done.returncode, [line.rstrip() for line in calls.read_text().splitlines()]

    return run


@pytest.mark.parametrize("way", ["brew", "pipx"])
def test_the_script_runs_the_lines_as_they_stand(stranger, way):
    code, calls = stranger(way, "It is Paris.")
    assert code == 0
    assert calls == [f"{way} install uv", "uv --version", COMMANDS[0], f"{COMMANDS[1]} -m unit"]


def test_the_script_fails_where_the_chat_does_not_answer(stranger):
    code, calls = stranger("brew", "")
    assert code != 0 and not any("pytest" in call for call in calls)


def test_on_macos_numpy_is_new_enough_to_give_no_wrong_warnings():
    """With Apple's Accelerate, NumPy before 2.4 warns of overflows that do not occur."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [need for line in project["dependencies"] if (need := Requirement(line)).name == "numpy"]
    for system, taken in {"darwin": False, "linux": True}.items():
        (need,) = [n for n in needs if n.marker is None or n.marker.evaluate({"sys_platform": system})]
        assert ("2.3.5" in need.specifier) == taken and "2.5.5" in need.specifier


def test_the_page_has_the_error_of_a_hidden_pth_file():
    """iCloud hides .pth files, and Python skips hidden .pth files. With -S, Python reads no .pth file."""
    folder = sysconfig.get_path("purelib")
    if not list(Path(folder).glob("_editable_skbc_ruvmlx.pth")):
        pytest.skip("ruvmlx is not installed from a clone")
    code = f"import sys; sys.path.append({folder!r}); import ruvmlx.apps.main"
    done = subprocess.run([sys.executable, "-P", "-S", "-c", code], capture_output=True, text=True)
    error = done.stderr.splitlines()[-1].removeprefix("ModuleNotFoundError: ")
    assert error and f"| `{error}` on a Mac |" in (ROOT / "docs/troubleshooting.md").read_text("utf-8")


def test_no_lock_file_needs_the_source_of_a_package_to_be_made():
    """A package without a wheel is downloaded whole, only to read its requirements, unless they are in
    pyproject.toml."""
    lock = ROOT / "uv.lock"
    if not lock.exists():
        pytest.skip("uv.lock does not exist: nothing has run `uv sync` here")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    described = {row["name"] for row in project["tool"]["uv"]["dependency-metadata"]}
    packages = tomllib.loads(lock.read_text())["package"]
    assert {row["name"] for row in packages if "sdist" in row and not row.get("wheels")} <= described
