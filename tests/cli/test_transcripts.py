"""What verbs print, at 80 and 120 columns, with colours and without: transcripts/ has it, for people to read.

`python -m tests.cli.write_transcripts` writes the files again; read the difference.
"""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ruvmlx import settings

from .write_transcripts import FOLDER, SETS, WIDTHS, difference, paths

# The starter's verbs take minutes, so only a whole run compares them with their files, or reads these.
MARKS = {"plain": (), "starter": pytest.mark.full}
NAMES = [pytest.param(f"{verbs}-{width}", marks=MARKS[verbs]) for verbs in SETS for width in WIDTHS]
BINARY = re.compile(r"\b[KMGT]iB\b")


def too_long(text: str, width: int) -> list[str]:
    """The lines that do not fit the terminal; not those that the user typed."""
    return [line for line in text.splitlines() if len(line) > width and not line.startswith("$ ")]


def broken_commands(text: str) -> list[str]:
    """The lines on which a command in backquotes begins or ends, but not both."""
    return [line for line in text.splitlines() if line.count("`") % 2]


def verbs_of(verbs: str) -> list[str]:
    return SETS[verbs].strip().splitlines()


def rows_of(text: str) -> dict[str, str]:
    """What was printed, by verb; of a verb that runs twice, all of it."""
    found: dict[str, str] = {}
    for row in text.removeprefix("$ ruvmlx ").split("\n$ ruvmlx "):
        verb, _, printed = row.partition("\n")
        found[verb] = found.get(verb, "") + printed
    return found


def test_every_verb_has_a_transcript():
    """The verbs come from the parser: a new one fails here until it has a row."""
    rows = [row for verbs in SETS for row in verbs_of(verbs)]
    missing = [path for path in paths() if not any(f"{row} ".startswith(f"{path} ") for row in rows)]
    assert not missing, f"write a row for {missing} in write_transcripts.py"


@pytest.mark.parametrize("name", NAMES)
def test_transcripts_have_all_rows_fit_the_terminal_and_count_well(name):
    text = (FOLDER / f"{name}.txt").read_text("utf-8")
    rows, (verbs, width) = rows_of(text), name.split("-")
    assert list(rows) == list(dict.fromkeys(verbs_of(verbs)))
    assert too_long(text, int(width)) == []
    assert broken_commands(text) == []
    assert not BINARY.search(text)
    assert not re.search(r"\b\d{7,}\b", text)  # a size in digits
    assert not re.search(r"\b1 (ratings|replies|chats|tokens|seeds|checks|messages|files|rows)\b", text)


def test_planted_mistakes_are_found():
    """A line of 81 columns, a command over two lines, and a unit of powers of two."""
    text = (FOLDER / "plain-80.txt").read_text("utf-8")
    line = next(line for line in text.splitlines() if line.count("`") == 2)
    assert too_long(text + "x" * 81, 80) == ["x" * 81] and too_long(text + "x" * 80, 80) == []
    head, command, tail = line.split("`")
    first, last = command.rsplit(" ", 1)
    planted = text.replace(line, f"{head}`{first}\n{last}`{tail}", 1)
    assert broken_commands(planted) == [f"{head}`{first}", f"{last}`{tail}"]
    assert BINARY.search(text + "kv_disk 1024 MiB")


def test_each_setting_has_an_explanation_and_each_group_a_heading():
    """In the transcript itself, so that an empty or missing text of a setting is seen there."""
    text = rows_of((FOLDER / "plain-120.txt").read_text("utf-8"))["config show"]
    for heading, group in settings.GROUPS.items():
        lines = text[text.index(heading) :].splitlines()
        rows = {line.split()[0]: line for line in lines[1:] if line[2:3].strip()}
        for name, meaning in group.items():
            assert len(meaning.split()) > 3, name
            assert meaning.split()[0] in rows[name] and meaning.split()[1] in rows[name], name


def compare(verbs: str, width: int, folder) -> None:
    """Run the verbs again, and compare what they print with the committed files."""
    command = [sys.executable, "-m", "tests.cli.write_transcripts", verbs, "--width", str(width)]
    done = subprocess.run([*command, "--out", str(folder)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for file in (f"{verbs}-{width}.txt", f"{verbs}-{width}-colour.txt"):
        now, kept = (rows_of((place / file).read_text("utf-8")) for place in (folder, FOLDER))
        if find_spec("mcp") is None:  # an extra
            now, kept = ({verb: x[verb] for verb in x if not verb.startswith("mcp ")} for x in (now, kept))
        assert difference("\n".join(kept.values()), "\n".join(now.values())) == ""
        assert list(now) == list(kept)


@pytest.mark.parametrize("width", WIDTHS)
def test_verbs_print_what_is_committed(width, tmp_path, starter_file):
    """Those that need no weights of a model."""
    compare("plain", width, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("width", WIDTHS)
def test_verbs_of_the_starter_print_what_is_committed(width, tmp_path, starter_file):
    compare("starter", width, tmp_path)
