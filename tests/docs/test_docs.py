"""The documentation agrees with the program: commands, settings, files, links, code."""

import importlib.util
import json
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli import cli

import ruvmlx
from ruvmlx import settings

from . import pages

LINES = [line for page in pages.PAGES for line in pages.command_lines(page)]
BLOCKS = [
    pytest.param(source, runnable, id=f"{pages.name_of(page)}-{i}")
    for page in pages.PAGES
    for i, (source, runnable) in enumerate(pages.python_blocks(page))
]
KINDS = {str: "text", int: "a whole number", float: "a number"}
FOLDERS = "ruvmlx|apps|examples|neon|metal_kernels|tests|docs|.ci|.github"
by_page = pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)


def test_the_readme_is_short():
    """At most 900 words that a reader sees; everything else is in docs/."""
    shown = re.sub(r"<!--.*?-->", "", (pages.ROOT / "README.md").read_text("utf-8"))
    assert 300 < len(shown.split()) <= 900


def test_the_site_builds(tmp_path):
    """Sphinx builds it without a warning and without a network; a link to nothing is a warning."""
    missing = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed (uv sync --group docs)")
    options = ["-W", "--keep-going", "-q", "-E", "-d", str(tmp_path / "trees")]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(pages.ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    for page in (pages.ROOT / "docs").glob("*.md"):
        assert (tmp_path / "site" / f"{page.stem}.html").stat().st_size > 1000


def test_every_page_is_in_the_table_of_contents():
    """index.md names each page of docs/ in one of its lists, and no page twice."""
    index = (pages.ROOT / "docs" / "index.md").read_text("utf-8")
    lists = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    named = [line for part in lists for line in part.splitlines() if re.fullmatch(r"[a-z-]+", line)]
    assert sorted(named) == sorted(p.stem for p in (pages.ROOT / "docs").glob("*.md") if p.stem != "index")


NO_GUIDES = ("index", "contributing", "changelog")
GUIDES = [page for page in sorted((pages.ROOT / "docs").glob("*.md")) if page.stem not in NO_GUIDES]


@pytest.mark.parametrize("page", GUIDES, ids=pages.name_of)
def test_a_page_says_first_what_its_reader_can_do(page):
    """And it shows a picture, a table or an example before its first formula."""
    text = page.read_text("utf-8")
    assert text.split("\n\n")[1].startswith("After this page you can ")
    before_formulas = re.split(r"\$\$|\$\\?[A-Za-z]", text)[0]
    assert re.search(r"^(!\[|\| |    \S|```)", before_formulas, re.MULTILINE)


@by_page
def test_links_lead_somewhere(page):
    """Files that links name exist, and so do the headings in them."""
    for target in pages.links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{target}: no such file"
        assert not anchor or anchor in pages.anchors(file), f"{target}: no such heading"


@by_page
def test_named_files_exist(page):
    """A path of this repository that is set as code exists."""
    if page.name == "CHANGELOG.md":  # it tells of the past
        return
    found = re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*", pages.code(page))
    for path in (name.rstrip("./") for name in found):
        assert path.endswith("/FOLDER") or path == "docs/build" or (pages.ROOT / path).exists(), path


def test_there_are_command_lines_to_check():
    """The pages show most verbs; an extraction that found nothing would pass every test below."""
    verbs = {line.words[0] for line in LINES if line.words}
    assert len(LINES) > 100 and set(cli.list_commands(None)) <= verbs


@pytest.mark.parametrize("line", sorted(set(LINES), key=str), ids=str)
def test_command_lines_parse(line):
    """The verb and its flags exist and take these values. Inline mentions may leave arguments out."""
    try:
        _parse(cli, "ruvmlx", list(line.words))
    except click.MissingParameter:
        assert not line.whole
    except click.exceptions.Exit as end:  # --help, --version
        assert end.exit_code == 0


def _parse(command: click.Command, name: str, words: list[str], parent: click.Context | None = None) -> None:
    """Parse, run nothing. The verbs of a group are looked up in it; raises click.UsageError."""
    if not isinstance(command, click.Group):
        command.make_context(name, words, parent)
        return
    group = click.Context(command, parent, name)
    if not words or words == ["COMMAND", "--help"]:
        return
    verb = command.get_command(group, words[0])
    assert verb is not None, f"{words[0]} is no verb of {name}"
    _parse(verb, words[0], words[1:], group)


@pytest.mark.parametrize(("source", "runnable"), BLOCKS)
def test_python_compiles(source, runnable):
    """Every Python block is valid."""
    compile(source, "<docs>", "exec")


RUN = [block for block in BLOCKS if block.values[1]]


@pytest.mark.parametrize(("source", "runnable"), RUN)
def test_marked_python_runs(source, runnable, tiny_folder, monkeypatch, tmp_path):
    """What the page shows works as it stands there, with a small random model and an empty store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUVMLX_MODEL", str(tiny_folder))
    monkeypatch.setenv("RUVMLX_MAX_TOKENS", "8")
    exec(compile(source, "<docs>", "exec"), {"__name__": "__docs__"})


def test_the_table_of_settings():
    """docs/settings.md lists exactly the settings there are: defaults, allowed values, meanings."""
    text = (pages.ROOT / "docs" / "settings.md").read_text("utf-8")
    rows = re.findall(r"^\| `.*\|$", text, re.MULTILINE)
    wanted = list(_settings_rows())
    assert rows == wanted, "docs/settings.md should have:\n" + "\n".join(wanted)


def _settings_rows():
    shown = json.loads(CliRunner().invoke(cli, ["config", "show", "--json"]).stdout)
    for name, found in shown.items():
        spec = settings.SPECS[name]
        default = "" if found["value"] in (None, "") else f"`{spec.display(found['value'])}`"
        yield f"| `{name}` | {default} | {spec.allowed_values or KINDS[spec.kind]} | {spec.doc} |"


def test_the_names_of_the_api():
    """docs/api.md lists every public name of `import ruvmlx`, and no other."""
    text = (pages.ROOT / "docs" / "api.md").read_text("utf-8")
    table = text[text.index("## All names") :]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(ruvmlx.__all__)


def test_the_fields_of_json():
    """Every field that docs/scripts.md lists is one that the verb prints (tests/cli/json_fields.json)."""
    printed = json.loads((pages.ROOT / "tests" / "cli" / "json_fields.json").read_text("utf-8"))
    text = (pages.ROOT / "docs" / "scripts.md").read_text("utf-8")
    rows = re.findall(r"^\| `ruvmlx ([^`]+) --json` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 8
    for command, cell in rows:
        verbs = [verb for verb in printed if f"{command} ".startswith(f"{verb.partition(' --')[0]} ")]
        if command != "bench":  # it takes minutes; tests/bench looks at its rows
            assert verbs, command
            paths = [re.sub(r"(\[\])+$", "", path) for verb in verbs for path in printed[verb]]
            gone = set(re.findall(r"`(\w+)`", cell)) - {path.rpartition(".")[2] for path in paths}
            assert not gone, f"ruvmlx {command} does not print {gone}"
