"""What a run leaves out (selection.py, modules.py), and builds that runs share (builds.py)."""

import os
import shutil
import subprocess
import sys
from itertools import combinations, product

import pytest

from . import builds, mutants, selection

CONFTEST = """
from pathlib import Path
from tests import modules, selection
selection.ROOT, selection.PASSED = Path(__file__).parent, Path(__file__).parent / "passed"
selection.TESTED, selection.DEAR_TESTS = selection.ROOT / "tested.tsv", selection.ROOT / "dear.tsv"
selection.RUVMLX = ("c",)

def pytest_addoption(parser):
    parser.addoption("--full", action="store_true")

def pytest_collection_modifyitems(config, items):
    selection.choose(config, items)

def pytest_pycollect_makemodule(module_path, parent):
    return modules.Module.from_parent(parent, path=module_path)

import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and report.passed:
        selection.note_pass(item)
    return report
"""
TESTS = """
import os
import pytest

def test_always(): pass

@pytest.mark.full
def test_deep(): pass

@pytest.mark.full("c")
def test_of_c(): assert "FAILS" not in os.environ

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_case(n): pass

@pytest.mark.one_in(10)
@pytest.mark.parametrize("seed", range(25))
def test_seed(seed): pass

@pytest.mark.pairwise
@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(3))
def test_product(a, b, c): pass
"""
MISSING = """
import pytest
pytest.importorskip("a_package_that_is_not_there", reason="the group `clients` is not installed")
def test_one(): assert False
class TestMany:
    async def test_two(self): assert False
"""


@pytest.fixture
def run(tmp_path):
    """run(*arguments) -> names of the tests that passed, in a folder with TESTS."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "source.c").write_text("int x;")

    def run(*arguments, **environment):
        options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-rA"]
        command = [sys.executable, "-m", "pytest", *options, *(arguments or (str(tmp_path),))]
        there = os.environ | {"PYTHONPATH": str(builds.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        there |= environment
        there.pop("PYTEST_ADDOPTS", None)
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=there, check=False)
        return [line for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "SKIPPED"))]

    return run


def names(lines):
    return [line.split("::")[1].split()[0] for line in lines if line.startswith("PASSED")]


def test_a_run_leaves_out_what_is_marked(run):
    found = names(run())
    assert found[:6] == [
        "test_always",
        "test_case[1]",
        "test_case[3]",
        *(f"test_seed[{n}]" for n in (0, 10, 20)),
    ]
    assert 9 <= len(found[6:]) <= 14  # of 27, each pair of two values


def test_full_runs_every_case(run, tmp_path):
    assert len(names(run("--full", str(tmp_path)))) == 1 + 1 + 1 + 3 + 25 + 27


def test_a_test_that_is_named_runs(run, tmp_path):
    assert names(run(f"{tmp_path}/test_some.py::test_deep")) == ["test_deep"]


def test_changed_inputs_bring_a_test_back_until_it_passes(run, tmp_path):
    """Also after a failure, which is no pass; what they were at the first run counts as tested."""
    assert "test_of_c" not in names(run())
    (tmp_path / "c" / "source.c").write_text("int y;")
    assert any(line.startswith("FAILED") and "test_of_c" in line for line in run(FAILS="1"))
    assert "test_of_c" in names(run())
    assert "test_of_c" not in names(run())


def test_a_new_clone_tests_what_no_full_run_has_tested(run, tmp_path, monkeypatch):
    """Only then: its first run believes data/tested.tsv."""
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.setattr(selection, "TESTED", tmp_path / "tested.tsv")
    selection.keep_tested(["c"])
    assert "test_of_c" not in names(run())
    shutil.rmtree(tmp_path / "passed")
    (tmp_path / "c" / "source.c").write_text("int y;")
    assert "test_of_c" in names(run())


def test_dear_tests_run_where_what_they_test_has_changed(run, tmp_path):
    (tmp_path / "dear.tsv").write_text("1.5\ttest_some.py::test_always\n2.0\ttest_some.py::test_deep\n")
    assert "test_always" not in names(run())
    (tmp_path / "c" / "source.c").write_text("int y;")
    assert "test_always" in names(run()) and "test_always" not in names(run())
    assert {"test_always", "test_deep"} <= set(names(run("--full", str(tmp_path))))


def test_dear_tests_are_those_that_cost_more(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "DEAR_TESTS", tmp_path / "dear.tsv")
    selection.keep_dear([f"{selection.DEAR + 0.1}\tb::x[a\tb]", f"{selection.DEAR}\tc::x", "9.00\ta::x"])
    assert selection.dear_tests() == {"a::x", "b::x[a\tb]"}
    selection.keep_dear(["0.10\ta::x", "3.00\td::x"])  # b::x did not run
    assert selection.dear_tests() == {"b::x[a\tb]", "d::x"}
    assert set(selection.subjects("tests/kv/test_walk.py::x")) > {"ruvmlx/kv", "tests/kv/test_walk.py"}


def test_what_folders_test_is_there():
    for name in dict.fromkeys((*selection.SUBJECTS, "tests")):
        assert all(
            (selection.ROOT / place).exists() for place in selection.subjects(f"tests/{name}/x::y")[:-1]
        )
        assert name == "tests" or (selection.ROOT / "tests" / name).is_dir()


def test_tests_of_a_module_that_lacks_a_package_say_so(run, tmp_path):
    (tmp_path / "test_client.py").write_text(MISSING)
    said = [line for line in run() if line.startswith("SKIPPED")]
    assert said == ["SKIPPED [2] test_client.py: the group `clients` is not installed"]


def test_every_pair_of_values_meets():
    """As in the whole product; with holes in it, too."""
    for sizes in ((3, 4, 2), (2, 2, 2, 5), (7,), (6, 5)):
        cases = [tuple(enumerate(case)) for case in product(*map(range, sizes)) if sum(case) % 5 != 4]
        chosen = [cases[i] for i in selection.pairwise(cases)]
        every = {pair for case in cases for pair in combinations(case, 2)}
        assert {pair for case in chosen for pair in combinations(case, 2)} == every
    assert len(selection.pairwise([tuple(enumerate(case)) for case in product(range(4), repeat=4)])) < 40


def test_a_build_is_made_once_for_its_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(builds, "BUILDS", tmp_path)
    made = []

    def make(to):
        made.append(to.write_text("x"))

    first = builds.built_file("kind", make, "cc", "-O1")
    assert builds.built_file("kind", make, "cc", "-O1") == first and len(made) == 1
    assert builds.built_file("kind", make, "cc", "-O2") != first and len(made) == 2
    assert builds.digest("ab", "c") != builds.digest("a", "bc")
    os.utime(first.parent, (0, 0))
    builds.drop_unused()
    assert not first.exists() and len(list(tmp_path.rglob("made"))) == 1


def test_a_build_that_failed_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(builds, "BUILDS", tmp_path)

    def fail(to):
        to.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        builds.built_file("kind", fail)
    assert builds.built_file("kind", lambda to: to.write_text("whole")).read_text() == "whole"


def test_contents_are_those_of_names_and_bytes(tmp_path):
    for name, text in (("a/x.c", "1"), ("b/x.c", "1"), ("c/x.c", "2"), ("d/y.c", "1")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    a, b, c, d = (builds.contents(tmp_path / folder) for folder in "abcd")
    assert a == b and len({a, c, d}) == 3


@pytest.mark.parametrize(
    "text, counts",
    [
        ('"""M."""\n\ndef f(x):\n    """Other words."""\n    # a comment\n    return  x + 1\n', False),
        ('"""M."""\ndef f(x): return x + 1\n', False),
        ('"""Other words."""\ndef f(x):\n    return x + 1\n', False),
        ('"""M."""\ndef f(x):\n    """Words."""\n    return x + 2\n', True),
        ('"""M."""\ndef f(x):\n    return "x" + 1\n', True),
    ],
)
def test_comments_and_docstrings_are_not_code(tmp_path, text, counts):
    before = '"""M."""\ndef f(x):\n    """Words."""\n    return x + 1\n'
    for folder, content in (("a", before), ("b", text)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(content)
    assert (builds.code(tmp_path / "a") != builds.code(tmp_path / "b")) is counts


def test_the_docstring_that_a_command_prints_is_code(tmp_path):
    for folder, word in (("a", "one"), ("b", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(f'"""{word}"""\nprint(__doc__)\n')
    assert builds.code(tmp_path / "a") != builds.code(tmp_path / "b")


@pytest.mark.parametrize(
    "text, counts",
    [
        ('int a; /* two\n\n lines */\nchar *s = "/*"; // b\n', False),
        ('int a;\nchar *s = "//"; // b\n', True),
        ('int b;\nchar *s = "/*"; // b\n', True),
        ('int a; /* */ //\n\n\nchar *s = "/*";\n', False),
    ],
)
def test_comments_of_c_are_not_code(tmp_path, text, counts):
    for folder, content in (("a", 'int a;\nchar *s = "/*"; // comment "\n'), ("b", text)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.c").write_text(content)
    assert (builds.code(tmp_path / "a") != builds.code(tmp_path / "b")) is counts


def test_each_byte_of_other_files_is_code(tmp_path):
    for folder, content in (("a", "// one\n"), ("b", "// two\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.metal").write_text(content)
    assert builds.code(tmp_path / "a") != builds.code(tmp_path / "b")


def test_every_mutant_can_be_planted():
    """The line that it changes is in its file, once; the tests that look for it are there."""
    for mutant in mutants.MUTANTS:
        assert (builds.ROOT / mutant.file).read_text("utf-8").count(mutant.right) == 1, mutant
        assert all((builds.ROOT / name).exists() for name in mutant.tests.split()), mutant
