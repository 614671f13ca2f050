"""The developer's commands, hooks and forms name what exists: Makefile, .pre-commit-config.yaml, .github/."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from ruvmlx.apps.cli import cli

ROOT = Path(__file__).parents[2]
TARGETS = ["test", "part", "full", "lint", "types", "docs", "screens", "bench", "compare", "clean"]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
# Options of `uv run`, and how many words follow each.
UV_OPTIONS = {"--no-sync": 0, "--group": 1}
NO_TOOLS = {"rm"}  # programs of every system


def make(*words: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # `make part` runs this test, too: its own variables must not reach the make of the test
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=outside)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(line: str) -> list[list[str]]:
    """Return the words of each command of a shell line."""
    return [shlex.split(part) for part in line.split("&&")]


def without_uv(words: list[str]) -> list[str]:
    """Return what `uv run` runs."""
    if words[:2] != ["uv", "run"]:
        return words
    words = words[2:]
    while words[0].startswith("--"):
        words = words[1 + UV_OPTIONS[words[0]] :]
    return words


def problem(words: list[str]) -> str:
    """Say which part of a command does not exist; "" if all of it does."""
    program, *rest = without_uv(words)
    if program == "python":
        assert rest[0] == "-m"
        return "" if importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"
    if program == "ruvmlx":
        return _problem_of_verb(rest)
    if program not in NO_TOOLS and not (Path(sys.executable).parent / program).exists():
        return "" if program == "sphinx-build" else f"no program {program} in the environment"
    missing = [word for word in rest if word.startswith("tests/") and not (ROOT / word).exists()]
    return f"no {missing[0]}" if missing else ""


def _problem_of_verb(words: list[str]) -> str:
    verb = cli.get_command(click.Context(cli), words[0])
    if verb is None:
        return f"no verb {words[0]}"
    try:
        verb.make_context(words[0], words[1:])
    except click.ClickException as error:
        # the reports of `bench compare` are the user's files
        return "" if ".json" in error.format_message() else error.format_message()
    return ""


def test_make_lists_ten_commands_with_their_help():
    lines = make().splitlines()
    assert [line.split()[0] for line in lines] == TARGETS
    assert all(len(line.split(maxsplit=1)[1]) > 10 for line in lines)


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_calls_what_exists(target):
    lines = make("--dry-run", target).splitlines()
    found = [words for line in lines for words in commands(line)]
    assert found and not [told for words in found if (told := problem(words))]


@pytest.mark.parametrize(
    "line",
    ["uv run nonsuch check", "uv run --no-sync pytest tests/nonsuch", "uv run ruvmlx nonsuch",
     "uv run --group docs python -m tests.nonsuch", "uv run ruvmlx bench --nonsuch"],
)  # fmt: skip
def test_a_planted_mistake_is_found(line):
    assert problem(shlex.split(line))


def test_no_target_deletes_what_git_tracks():
    [line] = make("--dry-run", "clean").splitlines()
    folders = shlex.split(line)[2:]
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    kept = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(folders) > 3 and kept.stdout == ""


def test_hooks_are_the_project_s_own_and_fetch_nothing():
    assert [repo["repo"] for repo in HOOKS] == ["local"]
    for hook in HOOKS[0]["hooks"]:
        assert hook["language"] == "system" and hook["entry"].startswith("uv run --no-sync ")
        assert problem(shlex.split(hook["entry"])) == ""


def test_the_hooks_check_what_every_change_must_pass():
    """The lines of .ci/run before the tests."""
    wanted = re.findall(r"uv run --no-sync ((?!pytest).*)", (ROOT / ".ci/run").read_text("utf-8"))
    entries = [hook["entry"] for hook in HOOKS[0]["hooks"]]
    assert wanted and all(any(line in entry for entry in entries) for line in wanted)


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_the_forms_for_issues_are_complete(form):
    """What GitHub requires of a form: a name, a description, fields with labels and ids of their own."""
    told = yaml.safe_load(form.read_text("utf-8"))
    if form.stem == "config":
        assert told == {"blank_issues_enabled": True}
        return
    fields = [field for field in told["body"] if field["type"] != "markdown"]
    assert told["name"] and told["description"] and fields
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_the_commands_in_the_forms_parse():
    said = "\n".join(form.read_text("utf-8") for form in FORMS)
    lines = re.findall(r"`?(?:uv run )?ruvmlx ((?:doctor|chat)[^`\n]*)", said)
    assert any("--report" in line for line in lines)
    assert not [told for line in lines if (told := _problem_of_verb(shlex.split(line)))]


def test_a_change_s_form_names_targets_that_exist():
    text = (ROOT / ".github/PULL_REQUEST_TEMPLATE.md").read_text("utf-8")
    named = [word for line in re.findall(r"`make ([^`]*)`", text) for word in line.split() if "=" not in word]
    assert named and {*named} <= {*TARGETS}
