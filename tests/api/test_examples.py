"""The programs of `examples/` run as a user starts them, and do what their first line says."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ruvmlx

from ..server.conftest import Access, ServerLimits, run_server

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def run(home, tmp_path):
    """Run a program of `examples/` with a model. Return its output, or its error if it fails."""

    def run_example(name: str, model: Path, *words: str, fails: bool = False, **variables: str) -> str:
        tiny = {"RUVMLX_MODEL": str(model), "RUVMLX_MAX_TOKENS": "12"}
        done = subprocess.run(
            [sys.executable, EXAMPLES / name, *words], cwd=tmp_path, capture_output=True, text=True,
            timeout=120, check=False, env=os.environ | tiny | variables,
        )  # fmt: skip
        assert done.returncode == fails, done.stderr
        return done.stderr if fails else done.stdout

    return run_example


def test_each_program_is_short_and_has_a_test():
    assert len(PROGRAMS) == 5
    tests = Path(__file__).read_text("utf-8").partition("def test_each_program_is_short")[2]
    for name in PROGRAMS:
        assert len((EXAMPLES / name).read_text("utf-8").splitlines()) <= 40, name
        assert f'run("{name}"' in tests, f"no test runs {name}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_readers_find_each_program(name):
    """Its own first lines say how it is started; the page of the Python API names it."""
    assert f"python examples/{name}" in (EXAMPLES / name).read_text("utf-8")
    assert f"examples/{name}" in (ROOT / "docs" / "api.md").read_text("utf-8")


def test_the_wheel_leaves_the_programs_out():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["scikit-build"]["wheel"]
    assert not any("examples" in place for pair in packages["packages"].items() for place in pair)


def test_a_rating_changes_the_next_reply(run, tiny_folder):
    output = run("rated_stream.py", tiny_folder, "hello")
    first, rest, count = output.split("\n\n-- ")
    told, second = rest.split("\n\n", 1)
    assert "version 1" in told and "1 rating(s)" in count
    assert first and second and first != second


def test_each_line_of_a_file_gets_an_answer(run, tiny_folder, tmp_path):
    """Empty lines have none; a second run writes the same words."""
    (tmp_path / "questions.txt").write_text("hello\n\nwhat is a lake?\n", "utf-8")
    written = []
    for name in ("first.jsonl", "second.jsonl"):
        run("prompt_batch.py", tiny_folder, "questions.txt", name, RUVMLX_TEMPERATURE="1")
        written.append([json.loads(line) for line in (tmp_path / name).read_text("utf-8").splitlines()])
    first, second = written
    assert [answer["prompt"] for answer in first] == ["hello", "what is a lake?"]
    assert [answer["text"] for answer in first] == [answer["text"] for answer in second]
    assert first[0]["text"] != first[1]["text"] and first[0]["id"] != second[0]["id"]


def test_a_missing_file_of_questions_does_not_empty_the_file_of_answers(run, tiny_folder, tmp_path):
    (tmp_path / "answers.jsonl").write_text("kept", "utf-8")
    error = run("prompt_batch.py", tiny_folder, "missing.txt", "answers.jsonl", fails=True)
    assert "missing.txt" in error and len(error.splitlines()) == 1
    assert (tmp_path / "answers.jsonl").read_text("utf-8") == "kept"


def test_without_a_server_the_client_says_how_to_start_one(run, tiny_folder):
    error = run("http_client.py", tiny_folder, "hello", fails=True, RUVMLX_URL="http://127.0.0.1:1/v1")
    assert "ruvmlx serve" in error and len(error.splitlines()) == 1


def test_a_client_streams_a_reply_and_rates_it(run, open_tiny, tiny_folder):
    server = run_server(open_tiny, Access(()), ServerLimits())
    try:
        output = run("http_client.py", tiny_folder, "hello", RUVMLX_URL=server.url)
        rows = server.ask("GET", "/v1/models").json["data"]
    finally:
        server.stop()
    text, _, told = output.partition("\n-- rated up: ")
    assert text.strip() and "'applied': True" in told and rows


def test_each_adapter_writes_its_own_reply(run, tiny_folder):
    output = run("adapter_per_reply.py", tiny_folder, "hello")
    replies = dict(re.findall(r"^\[(.*?)\] (.*?)\n\n(?=\[|\Z)", output, re.DOTALL | re.MULTILINE))
    assert [*replies] == ["the original model", "praised", "blamed"]
    assert replies["praised"] != replies["blamed"]
    versions = {row.name: row.version for row in ruvmlx.list_adapters()}
    assert versions["praised"] == versions["blamed"] == 3


def test_the_closest_meaning_comes_first(run, starter_file, tmp_path):
    """The words of the closest text are none of the question's."""
    lines = ["The cake needs two eggs.", "Take the train to the coast.", "My cat sleeps all day."]
    (tmp_path / "notes.txt").write_text("\n".join(lines), "utf-8")
    output = run("semantic_search.py", starter_file, "how do I travel there", "notes.txt")
    found = [line.split("  ", 1) for line in output.splitlines()]
    assert found[0][1] == lines[1] and len(found) == 3
    assert [float(score) for score, _ in found] == sorted((float(score) for score, _ in found), reverse=True)
