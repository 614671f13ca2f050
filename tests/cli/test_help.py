"""`--help` of every verb: examples that parse, groups of options, exit codes; quick."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli import FILES, cli
from ruvmlx.apps.cli.help_pages import EXIT_CODES, PAGES, SECTIONS

from .verbs import one_line

SCRIPTS = Path(__file__).parents[2] / "docs" / "scripts.md"


def verbs(command: click.Command = cli, context: click.Context | None = None, path: str = ""):
    """(path, command, its context) of every verb and of the verbs in it."""
    context = context or click.Context(cli, info_name="ruvmlx")
    if path:
        yield path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            yield from verbs(inner, click.Context(inner, context, name), f"{path} {name}".strip())


ALL = [path for path, _, _ in verbs()]


def parse(words: list[str]) -> None:
    """Parse a command line; run nothing."""
    command, context = cli, click.Context(cli, info_name="ruvmlx")
    while isinstance(command, click.Group):
        command = command.get_command(context, words.pop(0))
        assert command is not None
    command.make_context(command.name, words, context)


def test_every_verb_has_a_page_and_no_page_is_left_over():
    assert sorted(ALL) == sorted(PAGES)
    assert sorted(verb for names in SECTIONS.values() for verb in names) == sorted(FILES)


@pytest.mark.parametrize("path", ALL)
def test_examples_parse_and_are_of_their_verb(path):
    """A flag that is gone, or a value that is not allowed, fails here."""
    examples = PAGES[path].examples
    assert len(examples) >= 2
    for words, does in examples:
        assert words.startswith(path) and does
        parse(shlex.split(words))


def test_an_example_that_does_not_parse_is_seen():
    for wrong in ("generate hi --no-such-flag", "learn chart --svg", "config set"):
        with pytest.raises(click.UsageError):
            parse(shlex.split(wrong))


@pytest.mark.parametrize("path", ALL)
def test_help_has_examples_and_exit_codes(path):
    shown = CliRunner().invoke(cli, [*path.split(), "--help"], terminal_width=80).stdout
    for words, _ in PAGES[path].examples:
        assert f"ruvmlx {words}" in shown
    assert "Exit codes: 0 ok, 1 failed, 2 wrong usage" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_options_are_grouped():
    shown = CliRunner().invoke(cli, ["generate", "--help"], terminal_width=80).stdout
    headings = re.findall(r"^([A-Z][\w ]+):$", shown, re.MULTILINE)
    assert headings == ["Options", "Reply", "Model and machine", "Output and help", "Examples"]
    reply = shown[shown.index("\nReply:") : shown.index("\nModel and machine:")]
    assert "--temp" in reply and "--backend" not in reply


def test_the_exit_codes_of_the_documentation():
    found = re.findall(r"^\| (\d+) \|", SCRIPTS.read_text("utf-8"), re.MULTILINE)
    assert [int(code) for code in found] == [code for code, _ in EXIT_CODES]


def test_help_imports_no_verb():
    """The list of verbs is a table: no verb's file, numpy or rich is imported for it."""
    code = "import sys; sys.argv = ['ruvmlx', '--help']\nfrom ruvmlx.apps.main import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "print('HEAVY', sorted({'numpy', 'rich', 'ruvmlx.apps.cli.learn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.rstrip().endswith("HEAVY []"), done.stdout + done.stderr


@pytest.mark.parametrize("path", ALL)
def test_a_verbs_help_imports_nothing_heavy(path):
    """Completion of its options takes as long."""
    if " " in path:
        return
    code = "import sys; from ruvmlx.apps.cli import cli; import click\n"
    code += f"assert cli.get_command(click.Context(cli), {path!r})\n"
    code += "print(sorted({'numpy', 'rich', 'mlx', 'huggingface_hub', 'sqlite3.dump'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--bogus", ""), ("--max-token", "--max-tokens"), ("--mode", "--model"), ("--xy", "")],
)
def test_an_option_that_is_not_known_brings_a_similar_one(typed, meant):
    """The dashes alone make no option similar."""
    with pytest.raises(click.NoSuchOption) as refused:
        cli.main(["generate", typed], standalone_mode=False)
    said = refused.value.format_message()
    assert f"'{meant}'" in said if meant else said == f"No such option {typed!r}."


def test_a_verb_that_is_not_known_brings_a_similar_one():
    """At the top, where no verb's file is imported, as in each group."""
    for typed, meant in (["lern"], "learn"), (["learn", "stats"], "status"), (["sesions", "ls"], "sessions"):
        with pytest.raises(click.UsageError) as refused:
            cli.main(typed, standalone_mode=False)
        assert f"Did you mean '{meant}'?" in refused.value.format_message()
    with pytest.raises(click.UsageError, match="there is no command 'zzz'"):
        cli.main(["zzz"], standalone_mode=False)


def test_a_verb_of_a_group_that_resembles_none_brings_the_groups_verbs():
    """The command "set" is only a letter away from "get", and does the opposite."""
    for typed, named in (["sessions", "find", "x"], "search"), (["config", "get", "system"], "show"):
        with pytest.raises(click.UsageError, match=f"has no command '{typed[1]}'. It has: .*{named}"):
            cli.main(typed, standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mcp", "--json"], "`ruvmlx mcp` has no --json: all that it prints are messages of MCP, in JSON."),
        (["chat", "--json"], "`ruvmlx chat` has no --json: it is for people."),
        (["launch", "--json"], "as in `ruvmlx launch -n 2 -- generate PROMPT --json`."),
        (["launch", "-n", "2", "--jsn", "--", "chat"], "launch has no option '--jsn'"),
    ],
)
def test_a_verb_without_json_says_why_or_where_it_stands(run, words, said):
    code, out, err = run(*words)
    assert (code, out) == (2, "") and one_line(err) and said in err
