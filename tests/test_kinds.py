"""The parts of the suite (kinds.py): every test is in one of them, and a unit test keeps the rules."""

import subprocess
import sys

import pytest

from . import kinds


def test_every_test_has_exactly_one_kind(request):
    """Of all that were collected in this run."""
    found = {
        item.nodeid: {mark.name for mark in item.iter_markers()} & set(kinds.KINDS)
        for item in request.session.items
    }
    assert {test: marks for test, marks in found.items() if len(marks) != 1} == {}


def test_the_tables_name_files_and_tests_that_exist():
    """Who renames a file or a test renames it in kinds.py, too."""
    text = {file.relative_to(kinds.TESTS).as_posix(): file.read_text() for file in kinds.TESTS.rglob("*.py")}
    for name in set(kinds.FILES) | kinds.SLOW:
        file, _, test = name.partition("::")
        assert file in text and (not test or f"def {test}(" in text[file]), name
    assert [name for name in kinds.FOLDERS if not (kinds.TESTS / name).is_dir()] == []


@pytest.mark.parametrize(
    "command",
    [["gcc", "-v"], ["/usr/bin/clang++-14"], [sys.executable, "-m", "ziglang", "cc"], "cmake --build ."],
)
def test_a_unit_test_that_starts_a_compiler_fails(command):
    with pytest.raises(pytest.fail.Exception, match="a unit test starts"):
        subprocess.run(command, check=False, shell=isinstance(command, str))


def test_a_unit_test_may_start_another_program():
    done = subprocess.run([sys.executable, "-c", "print('make')"], capture_output=True, text=True, check=True)
    assert done.stdout == "make\n"


def test_a_unit_test_that_opens_the_starter_model_fails(monkeypatch, tmp_path):
    """The guard compares paths: any file may stand for the model."""
    file = tmp_path / "starter.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(kinds.GUARD, "starter", str(file))
    with pytest.raises(pytest.fail.Exception, match="opens the starter model"):
        file.read_bytes()


def test_other_tests_are_not_guarded(monkeypatch, tmp_path):
    assert kinds.GUARD.on
    monkeypatch.setattr(kinds.GUARD, "starter", str(tmp_path / "starter.gguf"))
    with kinds.set_guard(False):
        (tmp_path / "starter.gguf").write_bytes(b"GGUF")
